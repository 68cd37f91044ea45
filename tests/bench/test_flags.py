"""How the frameworks' flags stood: in every record, and in what two records say of each other."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from polyattn import flags as knobs
from polyattn.bench import machine, main, records
from polyattn.bench.cpu import bench_cpu as run
from polyattn.bench.harm import whole_run as harm
from polyattn.bench.overhead import measure
from polyattn.errors import PolyattnError
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch.flags import snapshot

BACKEND = run.BACKEND if isinstance(module.status(), Available) else "sdpa_flash"
TINY = run.Options(repeats=2, block_s=1e-4, quick=True, only="short", backend=BACKEND)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def record() -> dict:
    return measure(rounds=2, block_s=2e-4, peers=False)


@pytest.fixture
def threads():
    """Set torch's threads to a number that is not the bench's own."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def standing(**knobs_of_torch) -> dict:
    return {"torch": knobs.make("torch", knobs_of_torch, {})}


def with_flags(record: dict, flags) -> dict:
    return {**copy.deepcopy(record), "flags": flags}


def without_flags(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "flags"}


def compared(a: dict, b: dict, folder: Path, capsys: pytest.CaptureFixture) -> tuple[dict, str]:
    """What the command says of two records: as JSON, and as text in one line."""
    paths = [str(folder / name) for name in ("one.json", "two.json")]
    for path, content in zip(paths, (a, b), strict=True):
        records.write(content, Path(path))
    capsys.readouterr()
    assert main(["compare", *paths, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["compare", *paths]) == 0
    return plain, " ".join(capsys.readouterr().out.split())


def test_overhead_says_how_the_flags_stood_while_it_measured(threads: int) -> None:
    found = measure(rounds=2, block_s=1e-4, peers=False)
    after = snapshot()
    assert set(found["flags"]) >= {"torch"}
    differing = knobs.diff(found["flags"]["torch"], after)
    assert differing and set(differing.values()) == {(1, threads)}  # the bench's own one thread
    assert json.loads(records.dump(found))["flags"] == json.loads(json.dumps(found["flags"]))


def test_cpu_and_harm_say_how_the_flags_stood(threads: int) -> None:
    for made in (run.measure(TINY), harm.measure(only="tiny decode (1,4,1x32,32) fp32")):
        assert knobs.diff(made["flags"]["torch"], snapshot()) == {}


def test_a_framework_that_is_not_loaded_is_left_alone() -> None:
    code = (
        "import sys; from polyattn.bench import machine; found = machine.flags(); "
        "print(found, [name for name in ('torch', 'jax') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.stdout == "{} []\n"


def test_every_loaded_framework_is_asked() -> None:
    loaded = {name for name in ("torch", "jax") if name in sys.modules}
    assert set(machine.flags()) == loaded


def test_compare_names_the_knobs_that_differ(
    record: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    a = with_flags(record, standing(threads=1, same=3, gone="x"))
    b = with_flags(record, standing(threads=2, same=3))
    plain, text = compared(a, b, tmp_path, capsys)
    assert plain["flags"] == {"torch": {"threads": [1, 2], "gone": ["x", knobs.ABSENT]}}
    assert plain["notes"] == [
        "flags of torch differ: threads: 1 and 2",
        "flags of torch differ: gone: 'x' and '<absent>'",
    ]
    assert "note: flags of torch differ: threads: 1 and 2" in text


def test_compare_says_nothing_of_flags_that_are_the_same(
    record: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plain, text = compared(record, record, tmp_path, capsys)
    assert (plain["notes"], plain["flags"]) == ([], {})
    assert "flags" not in text


def test_compare_says_which_framework_only_one_knows_of(
    record: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    both = standing(a=1) | {"jax": knobs.make("jax", {"x64": True}, {})}
    plain, _ = compared(
        with_flags(record, both), with_flags(record, standing(a=2)), tmp_path, capsys
    )
    assert plain["notes"] == [
        "flags of torch differ: a: 1 and 2",
        "b does not say how the flags of jax stood",
    ]
    plain, _ = compared(with_flags(record, {}), with_flags(record, both), tmp_path, capsys)
    assert [note.split(" stood")[0] for note in plain["notes"]] == [
        "a does not say how the flags of torch",
        "a does not say how the flags of jax",
    ]


@pytest.mark.parametrize(("old", "who"), [("a", "a does"), ("b", "b does"), ("ab", "a and b do")])
def test_records_from_before_still_compare(
    record: dict, old: str, who: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sides = [without_flags(record) if name in old else record for name in "ab"]
    plain, text = compared(*sides, tmp_path, capsys)
    assert plain["flags"] == {} and len(plain["notes"]) == 1
    assert plain["notes"][0].startswith(f"{who} not say how the frameworks' flags stood")
    assert f"note: {who} not say" in text


@pytest.mark.parametrize("kind", ["overhead", "cpu"])
def test_the_records_of_this_repository_are_read_as_they_are(kind: str, tmp_path: Path) -> None:
    found = sorted((ROOT / "benchmarks" / "results").rglob(f"{kind}.json"))
    assert found
    for path in found:
        shutil.copy(path, tmp_path / "copy.json")
        assert records.read(path) == json.loads(path.read_text())
        assert main(["compare", str(path), str(tmp_path / "copy.json")]) == 0


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        "as always",
        {"torch": None},
        {"torch": {}},
        {"torch": {"threads": 1}},
        {"torch": {**standing()["torch"], knobs.META: {"schema": 99, "framework": "torch"}}},
        {"torch": {knobs.META: {"schema": 1, "framework": "torch"}}},
        {"torch": {knobs.META: {"schema": 1, "framework": "torch", "unreadable": []}}},
        {"torch": knobs.make("jax", {}, {})},
        {"jax": standing()["torch"]},
    ],
)
def test_damaged_flags_are_a_clear_error(
    record: dict, damaged, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    records.write(record, good)
    records.write(with_flags(record, damaged), bad)
    with pytest.raises(PolyattnError, match=r"got .*expected .*make the record again"):
        records.read(bad)
    for order in ((good, bad), (bad, good)):
        assert main(["compare", *map(str, order)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "bad.json" in said and "Traceback" not in said
