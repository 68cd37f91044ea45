"""polyattn.jax.flags: what the table shows is what jax has, in each thread; reading is inert."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from polyattn import flags as knobs
from polyattn.jax import flags
from polyattn.jax.flags.reading import KNOBS

OPTIONS = {knob.name: knob for knob in KNOBS if knob.where.startswith("jax.config.")}
PRESENT = {name: knob for name, knob in OPTIONS.items() if name in jax.config.values}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Find jax as each test found it."""
    before = dict(jax.config.values)
    yield
    changed = [n for n, value in jax.config.values.items() if value != before.get(n, value)]
    for name in changed:
        jax.config.update(name, before[name])
    assert not changed, f"the test left {changed} changed"


@contextmanager
def updated(name: str, value: object) -> Iterator[None]:
    """Set an option for the process, and every option that it changes back again."""
    before = dict(jax.config.values)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before[name])


def elsewhere(function: Callable[[], Any]) -> Any:
    """Return what the function returns in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    return results[0]


def in_new_process(code: str, folder: Path, **environment: str) -> dict[str, Any]:
    """Run code that prints one line of JSON; a warning in it is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error:::polyattn", "-c", textwrap.dedent(code)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def value_of(name: str) -> object:
    return {row.name: row for row in flags.table()}[name].value


# A change is seen


def another(name: str) -> tuple[object, object]:
    """Return another value of an option as jax takes it, and as the table shows it."""
    knob, now = OPTIONS[name], value_of(name)
    enum_class = jax.config.meta[name][2].get("enum_class")
    if knob.type == "bool":
        return not now, not now
    if enum_class is not None:
        member = next(each for each in enum_class if each.name.lower() != now)
        return member, member.name.lower()
    if isinstance(knob.allowed, tuple):
        declared = jax.config.meta[name][2]["enum_values"]
        value = next(each for each in declared if each != now)
        return value, value
    return {"int": (77, 77), "float": (0.5, 0.5), "str": ("cpu", "cpu")}[knob.type]


@pytest.mark.parametrize("name", sorted(PRESENT.keys() - {"jax_num_cpu_devices"}))
def test_an_update_is_seen_in_every_thread(name: str) -> None:
    before, was = flags.snapshot(), value_of(name)
    value, shown = another(name)
    couples = {name, *OPTIONS[name].couples}
    with updated(name, value):
        assert flags.diff(before, flags.snapshot()) == dict.fromkeys(couples, (was, shown))
        assert flags.diff(before, elsewhere(flags.snapshot)) == dict.fromkeys(couples, (was, shown))
    assert flags.diff(before, flags.snapshot()) == {}


def enable_x64() -> Any:
    """Return jax's context manager, which has moved between versions."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)


SCOPES: dict[str, tuple[Callable[[], Any], dict[str, object]]] = {
    "precision": (
        lambda: jax.default_matmul_precision("float32"),
        {"jax_default_matmul_precision": "float32"},
    ),
    "x64": (enable_x64, {"jax_enable_x64": True}),
    "device": (
        lambda: jax.default_device(jax.local_devices(backend="cpu")[0]),
        {"jax_default_device": "cpu:0"},
    ),
    "platform": (lambda: jax.default_device("cpu"), {"jax_default_device": "cpu"}),
    "types": (
        lambda: jax.numpy_dtype_promotion("strict"),
        {"jax_numpy_dtype_promotion": "strict"},
    ),
    "ranks": (lambda: jax.numpy_rank_promotion("raise"), {"jax_numpy_rank_promotion": "raise"}),
    "generator": (lambda: jax.default_prng_impl("rbg"), {"jax_default_prng_impl": "rbg"}),
    "partitionable": (
        lambda: jax.threefry_partitionable(False),
        {"jax_threefry_partitionable": False},
    ),
    "no jit": (jax.disable_jit, {"jax_disable_jit": True}),
    "nan": (lambda: jax.debug_nans(True), {"jax_debug_nans": True}),
    "softmax": (lambda: jax.softmax_custom_jvp(True), {"jax_softmax_custom_jvp": True}),
    "transfers": (
        lambda: jax.transfer_guard("log"),
        dict.fromkeys(("jax_transfer_guard", *OPTIONS["jax_transfer_guard"].couples), "log"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_of_jax_is_seen_in_its_thread_and_in_no_other(scope: str) -> None:
    make, expected = SCOPES[scope]
    context = make()  # may start the backends, which is seen too
    before = flags.snapshot()
    with context:
        difference = flags.diff(before, flags.snapshot())
        there = elsewhere(flags.snapshot)
    assert difference == {name: (before[name], value) for name, value in expected.items()}
    assert flags.diff(before, there) == {}
    assert flags.diff(before, flags.snapshot()) == {}


def test_scopes_nest_and_an_exception_ends_them() -> None:
    before = flags.snapshot()
    with pytest.raises(RuntimeError, match="on purpose"), jax.default_matmul_precision("high"):
        with jax.default_matmul_precision("highest"):
            assert value_of("jax_default_matmul_precision") == "highest"
        assert value_of("jax_default_matmul_precision") == "high"
        raise RuntimeError("on purpose")
    assert flags.diff(before, flags.snapshot()) == {}


def test_the_value_of_a_thread_hides_that_of_the_process() -> None:
    inside = threading.Event(), threading.Event()
    seen = []

    def scoped() -> None:
        with jax.default_matmul_precision("float32"):
            inside[0].set()
            inside[1].wait(60)
            seen.append(value_of("jax_default_matmul_precision"))
        seen.append(value_of("jax_default_matmul_precision"))

    thread = threading.Thread(target=scoped)
    thread.start()
    inside[0].wait(60)
    with updated("jax_default_matmul_precision", "high"):
        inside[1].set()
        thread.join(60)
        assert value_of("jax_default_matmul_precision") == "high"
    assert seen == ["float32", "high"]


def test_a_snapshot_can_be_taken_while_jax_traces() -> None:
    taken = []

    def function(x: Any) -> Any:
        taken.append(flags.snapshot())
        return x + 1

    with jax.numpy_rank_promotion("warn"):
        jax.jit(function)(1.0)
    assert [each["jax_numpy_rank_promotion"] for each in taken] == ["warn"]


def test_a_device_that_is_no_plain_data_is_unreadable_and_breaks_nothing() -> None:
    class OddDevice:
        pass

    with jax.default_device(OddDevice()):  # jax takes anything whose type is called a device
        snapshot = flags.snapshot()
    assert "OddDevice" in snapshot[knobs.META]["unreadable"]["jax_default_device"]
    assert "jax_default_device" not in snapshot
    json.dumps(snapshot)


# Storing


def test_a_snapshot_survives_json(tmp_path: Path) -> None:
    jax.numpy.ones(2).block_until_ready()  # so that there are devices to write down
    with jax.default_device(jax.devices()[0]), jax.numpy_dtype_promotion("strict"), enable_x64():
        snapshot = flags.snapshot()
    (tmp_path / "flags.json").write_text(json.dumps(snapshot, allow_nan=False))
    again = knobs.read(tmp_path / "flags.json")
    assert again == snapshot
    assert flags.diff(snapshot, again) == {}
    assert again[knobs.META]["framework"] == "jax"
    assert again["backends.initialized"] is True
    assert again["backends.devices"]


# Reading is inert


def test_importing_and_reading_change_nothing_and_start_no_backend(tmp_path: Path) -> None:
    seen = in_new_process(
        """
        import json, os, sys
        import jax
        from jax._src import xla_bridge

        def state():
            return dict(jax.config.values), dict(os.environ), sorted(jax.config.meta)

        before = state()
        import polyattn.jax.flags as flags
        imported = state()
        first = flags.snapshot()
        flags.table(), flags.diff(first, flags.snapshot())
        after = state()
        print(json.dumps({
            "import": imported == before,
            "reading": after == before,
            "started": xla_bridge.backends_are_initialized(),
            "says": first["backends.initialized"],
            "devices": first["polyattn.flags"]["unreadable"]["backends.devices"],
            "pallas": "jax.experimental.pallas" in sys.modules,
        }))
        """,
        tmp_path,
    )
    assert seen.pop("devices").startswith("no backend is initialized yet")
    assert seen == {
        "import": True,
        "reading": True,
        "started": False,
        "says": False,
        "pallas": False,
    }
    assert list(tmp_path.iterdir()) == []


def test_once_the_backends_run_their_devices_are_told(tmp_path: Path) -> None:
    seen = in_new_process(
        """
        import json
        import jax
        import polyattn.jax.flags as flags
        before = {row.name: row for row in flags.table()}
        jax.numpy.ones(2).block_until_ready()
        after = {row.name: row for row in flags.table()}
        print(json.dumps({
            "platform": after["backends.default"].value,
            "devices": after["backends.devices"].value,
            "could be set": before["jax_platforms"].unsettable,
            "is fixed": after["jax_platforms"].unsettable,
        }))
        """,
        tmp_path,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
    )
    assert seen.pop("platform") == "cpu"
    assert seen.pop("devices") == ["cpu: cpu x 3"]
    assert "jax.config.update('jax_platforms'" in seen["could be set"]
    assert seen["is fixed"] == "it is read when the backends are initialized, and they are"


def test_what_the_environment_sets_is_seen(tmp_path: Path) -> None:
    code = """
        import json
        import polyattn.jax.flags as flags
        print(json.dumps(flags.snapshot()))
    """
    plain = in_new_process(code, tmp_path, XLA_FLAGS="")
    other = in_new_process(
        code,
        tmp_path,
        JAX_ENABLE_X64="1",
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="2",
        JAX_DEFAULT_MATMUL_PRECISION="highest",
        XLA_FLAGS="--xla_cpu_enable_fast_math=false",
    )
    expected = {
        "jax_enable_x64": (False, True),
        "jax_default_matmul_precision": (None, "highest"),
        "jax_platforms": (plain["jax_platforms"], "cpu"),
        "jax_num_cpu_devices": (-1, 2),
        "env.XLA_FLAGS": ("", "--xla_cpu_enable_fast_math=false"),
    }
    assert flags.diff(plain, other) == expected


def test_a_variable_that_is_not_set_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert value_of("env.XLA_FLAGS") is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=there")
    assert value_of("env.XLA_FLAGS") == "--xla_dump_to=there"


def test_a_jax_that_hides_whether_it_started_costs_only_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("jax._src.xla_bridge.backends_are_initialized")
    snapshot = flags.snapshot()
    unreadable = snapshot[knobs.META]["unreadable"]
    for name in ("backends.initialized", "backends.default", "backends.devices"):
        assert unreadable[name].startswith("this jax does not say whether a backend is initialized")
    assert snapshot["version"] == jax.__version__


def test_without_jax_the_import_says_how_to_get_it(tmp_path: Path) -> None:
    seen = in_new_process(
        """
        import json, sys
        sys.modules["jax"] = None  # as where it is not installed
        from polyattn.errors import MissingDependency
        try:
            import polyattn.jax.flags
        except MissingDependency as error:
            print(json.dumps({"error": str(error)}))
        """,
        tmp_path,
    )
    assert "pip install 'polyattn[jax]'" in seen["error"]
