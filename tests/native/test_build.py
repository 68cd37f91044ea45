"""Whether the native kernels are built, which instruction set is used, and life without them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from polyattn import MissingDependency, SettingsError, __version__, settings
from polyattn.cli import main
from polyattn.native import module
from polyattn.selection.registry import Available, Missing, registry

ROOT = Path(__file__).resolve().parents[2]
BUILT = isinstance(module.status(), Available)
BY_NAME = ("amx", "amx_twin")  # never the best of all, so behind all others
built_only = pytest.mark.skipif(not BUILT, reason="the native kernels are not built here")


@built_only
def test_what_runs_here_is_part_of_what_was_compiled() -> None:
    info, here = module.build_info(), module.isas()
    best = [name for name in here if name not in BY_NAME]
    assert best[-1] == "generic" and here[: len(best)] == tuple(best)
    assert [name for name in info.compiled if name in here] == list(here)
    assert set(info.compiled) <= set(settings.NATIVE_ISAS)
    assert info.version == __version__
    assert module.status() == Available(info.version, f"best here: {here[0]}", frozenset({"cpu"}))


@built_only
def test_the_best_is_used_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYATTN_NATIVE_ISA", raising=False)
    assert module.isa_index() == 0
    for place, name in enumerate(module.isas()):
        monkeypatch.setenv("POLYATTN_NATIVE_ISA", name.upper())
        assert module.isa_index() == place


@built_only
def test_an_instruction_set_that_is_not_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [name for name in settings.NATIVE_ISAS if name not in module.isas()]
    assert lacking  # no processor has AVX and NEON
    for name in lacking:
        monkeypatch.setenv("POLYATTN_NATIVE_ISA", name)
        who = "processor" if name in module.build_info().compiled else "build of polyattn"
        expected = f"{name}', which this {who} lacks; expected best or one of .*generic"
        with pytest.raises(SettingsError, match=expected):
            module.isa_index()


@built_only
def test_a_set_that_the_system_forbids_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What becomes of a system's refusal; ``native/tests/tiles_test.cpp`` makes some."""
    why = "the operating system, or the container, does not let this process use AMX's tiles"
    extension = module.load()

    class Forbidding:
        def refusal(self, place: int) -> str:
            return f"{why} ({module.isas()[place]})"

        def __getattr__(self, name: str) -> object:
            return getattr(extension, name)

    monkeypatch.setattr(module, "load", Forbidding)
    module._index_of.cache_clear()
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "generic")
    with pytest.raises(SettingsError, match=r"may not run: the operating .* tiles \(generic\)"):
        module.isa_index()
    assert main(["doctor"]) == 1
    assert "AMX's tiles (generic)" in " ".join(capsys.readouterr().out.split())


def test_an_unknown_instruction_set_lists_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"'avx1024', expected one of best, generic, avx2.*neon"
    ):
        settings.Settings.parse({"POLYATTN_NATIVE_ISA": "avx1024"})
    assert settings.Settings.parse({"POLYATTN_NATIVE_ISA": " AVX2"}).native_isa == "avx2"


def test_the_backend_probes_as_the_module_does() -> None:
    if "native_cpu" not in registry.names() or importlib.util.find_spec("torch") is None:
        pytest.skip("no backend runs on the module here")
    assert isinstance(registry.probe(("torch", "native_cpu")), Available) is BUILT


def run(arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_package(
    where: Path, arguments: list[str], **environ: str
) -> subprocess.CompletedProcess[str]:
    """With the package in `where`; -S keeps out the finder of an editable installation."""
    path = os.pathsep.join([str(where), sysconfig.get_path("purelib")])
    return run(["-S", *arguments], PYTHONPATH=path, **environ)


@pytest.fixture
def pure(tmp_path: Path) -> Path:
    """A copy of the package without the extension module."""
    ignored = shutil.ignore_patterns("_native.*", "__pycache__")
    shutil.copytree(ROOT / "src" / "polyattn", tmp_path / "polyattn", ignore=ignored)
    return tmp_path


def native_part(where: Path, **environ: str) -> dict:
    done = run_package(where, ["-m", "polyattn", "doctor", "--json"], **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["native"]


def test_without_the_extension_doctor_says_why_and_what_to_do(pure: Path) -> None:
    part = native_part(pure, CXX="/bin/false")
    assert not part["built"]
    assert "pure Python" in part["reason"]
    assert "/bin/false, does not compile C++20" in part["compiler_here"]
    assert "install a C++20 compiler" in part["how_to_get_it"]

    empty = pure / "empty"
    empty.mkdir()
    assert "no C++ compiler is here" in native_part(pure, CXX="", PATH=str(empty))["compiler_here"]

    code = "from polyattn.native import module; module.load()"
    done = run_package(pure, ["-c", code])
    assert "MissingDependency: got no native CPU kernels: this installation is pure" in done.stderr


def test_an_extension_that_cannot_be_used_says_so(pure: Path) -> None:
    other = pure / "polyattn" / "_native.cpython-399-x86_64-linux-gnu.so"
    other.write_bytes(b"")
    reason = native_part(pure)["reason"]
    assert reason.startswith(f"{other.name} was built for another Python, this one loads *.cpython")
    broken = pure / "polyattn" / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    other.rename(broken)
    assert native_part(pure)["reason"].startswith(f"{broken.name} cannot be loaded here: ")


@pytest.mark.skipif(BUILT, reason="the native kernels are built here")
def test_where_they_are_not_built_loading_says_what_to_do() -> None:
    assert isinstance(module.status(), Missing)
    with pytest.raises(MissingDependency, match="To have them: "):
        module.load()


@built_only
def test_doctor_shows_the_instruction_set_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "generic")
    assert main(["doctor", "--json"]) == 0
    part = json.loads(capsys.readouterr().out)["native"]
    assert (part["used"], part["forced"]) == ("generic", True)
    assert part["thread_pool"]
    foreign = next(name for name in settings.NATIVE_ISAS if name not in module.isas())
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", foreign)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert f"got POLYATTN_NATIVE_ISA='{foreign}'" in " ".join(shown.split())


def test_pip_install_without_a_compiler_gives_a_pure_wheel(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    source, target = tmp_path / "source", tmp_path / "target"
    left_out = shutil.ignore_patterns(".*", "build", "benchmarks", "tests", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_out)
    pip = ["-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation", "--no-index"]
    done = run([*pip, "--target", str(target), str(source)], CXX="/bin/false", CMAKE_ARGS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built without its native CPU kernels" in done.stderr
    (wheel,) = target.glob("polyattn-*.dist-info/WHEEL")
    assert "Tag: py3-none-any" in wheel.read_text()
    assert not list((target / "polyattn").glob("_native.*"))
    assert not native_part(target)["built"]
