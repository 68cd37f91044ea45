"""Calibrating this machine: when, what is kept, and what becomes of faults.

The kernels of most tests are stand-ins on a clock of their own, so that load is what a test says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from polyattn import Problem, record_selections, settings
from polyattn.cli.tune import main
from polyattn.selection import Selection, scopes
from polyattn.selection.evidence import KINDS, Machine, calibration, comparing, of_machine, shipped
from polyattn.selection.evidence.calibrated_rows import PREFIX, device_of
from polyattn.selection.evidence.comparing import BUSY
from polyattn.selection.platforms import Platform, platform_of, register_platform
from polyattn.selection.prepare import select_here
from polyattn.selection.registry import Available, registry
from polyattn.selection.requests import Request
from polyattn.selection.wishes import Wishes
from polyattn.torch import attention, explain
from polyattn.tuning import Measurement, lookup

pytestmark = pytest.mark.skipif(
    not isinstance(registry.probe(("torch", "native_cpu")), Available),
    reason="native_cpu is not built here",
)

DENSE = Problem(batch=1, q_len=1024, kv_len=1024, heads=8, kv_heads=8, head_dim=64)
DECODE = DENSE.with_(q_len=1, kv_len=4096)
UNKNOWN = Machine("Nobody", 1, "avx2", "2.13", 2, "avx2")
BESIDE = [kind for kind in reversed(KINDS) if kind not in ("train", "small train", "long decode")]
LONG = DECODE.with_(batch=8)


class StandIn:
    """A prober whose kernels take the times they are told: `ratios` by kind, 1.5 for others."""

    def __init__(self) -> None:
        self.now, self.waited = 0.0, 0.0
        self.ratios: dict[str, float] = {}
        self.asked: list[tuple[str, str]] = []
        self.error, self.refuses, self.is_busy = 0.0, None, False
        self.raises: BaseException | None = None
        self.on_call: Callable[[], None] = lambda: None
        self.where = UNKNOWN

    def machine(self) -> Machine:
        return self.where

    def refusal(self) -> str | None:
        return self.refuses

    @contextmanager
    def quiet(self) -> Iterator[None]:
        yield

    def probe(self, dtype: str, kind: str) -> Any:
        self.asked.append((dtype, kind))
        return _Pair(self, DENSE.with_(dtype=dtype, batch=1 + list(KINDS).index(kind)), kind)

    def take(self, seconds: float) -> None:
        self.on_call()
        if self.raises is not None:
            raise self.raises
        self.now += seconds
        self.waited += seconds * 2 if self.is_busy else 0.0


class _Pair:
    rival, tolerance = "sdpa_flash", 1e-3

    def __init__(self, prober: StandIn, problem: Problem, kind: str) -> None:
        self.prober, self.problem, self.error = prober, problem, prober.error
        self.ratio = prober.ratios.get(kind, 1.5)

    def native(self) -> None:
        self.prober.take(1e-4)

    def theirs(self) -> None:
        self.prober.take(1e-4 * self.ratio)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory of this test."""
    monkeypatch.setenv("POLYATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("POLYATTN_CALIBRATION", "on")
    return tmp_path / "cache"


@pytest.fixture
def prober(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in for this machine, of which nothing is known."""
    made, real = StandIn(), platform_of("torch")
    parts = {name: getattr(real, name) for name in real.__dataclass_fields__}
    register_platform(Platform(**{**parts, "prober": made}))
    monkeypatch.setattr(of_machine, "_assumed", None)
    on_its_clock = partial(comparing.compare, clock=lambda: made.now, waited=lambda: made.waited)
    monkeypatch.setattr(calibration, "compare", on_its_clock)
    as_in_a_new_process()
    yield made
    register_platform(real)
    as_in_a_new_process()


def as_in_a_new_process() -> None:
    of_machine.kept.forget()
    calibration._in_vain.clear()
    scopes.invalidate()


def chosen(problem: Problem = DENSE) -> Selection:
    return select_here(problem, Wishes())


def kept_rows() -> list[Any]:
    return [row for row in lookup.table().rows() if row[0].device.startswith(PREFIX)]


# What it does ------------------------------------------------------------------------------------


def test_an_unknown_machine_is_calibrated_once_for_a_dtype(prober: StandIn) -> None:
    prober.ratios = {"dense": 1.4, "decode": 0.7}
    found = chosen()
    assert (found.backend, found.source) == ("native_cpu", "HEURISTIC"), found.reason
    assert found.reason == (
        "1.4 x torch's kernel on dense float32 problems (1.4 - 1.4), measured here (calibration)"
    )
    assert prober.asked == [("float32", kind) for kind in BESIDE]
    assert "native_cpu: 0.7 x torch's kernel on decoding" in chosen(DECODE).reason
    assert chosen(DECODE).backend == "sdpa_flash" and len(prober.asked) == len(BESIDE)
    found = chosen(LONG)  # goes by what is known of decoding
    assert found.backend == "sdpa_flash" and "0.7 x torch's kernel" in found.reason
    assert len(prober.asked) == len(BESIDE)
    prober.asked.clear()
    chosen(DENSE.with_(dtype="bfloat16", grad=True))
    assert prober.asked == [("bfloat16", "train")]


def test_a_later_process_reads_what_is_kept(prober: StandIn, cache: Path) -> None:
    first = chosen().reason
    assert len(kept_rows()) == 2 * len(BESIDE)
    as_in_a_new_process()
    prober.asked.clear()
    assert chosen().reason == first and prober.asked == []


def test_what_is_kept_is_no_time_of_a_problem(prober: StandIn) -> None:
    chosen()
    (key, _), *_ = kept_rows()
    alike = Problem.from_json(key.problem)
    assert chosen(alike).source == "HEURISTIC"  # and not TUNED
    real = platform_of("torch")
    assert lookup.measured(alike, real.device_description("cpu"), real.versions()) == []


def test_an_export_and_an_import_carry_it(prober: StandIn, tmp_path: Path) -> None:
    first = chosen().reason
    lookup.table().export_json(tmp_path / "times.json")
    lookup.table().forget()
    assert lookup.table().import_json(tmp_path / "times.json") == 2 * len(BESIDE)
    as_in_a_new_process()
    prober.asked.clear()
    assert chosen().reason == first and prober.asked == []


def test_explain_gives_the_answer_of_the_call(prober: StandIn) -> None:
    q = torch.randn(1, 512, 8, 64)
    told = explain(q, q, q)
    assert "measured here" in told.reason and prober.asked
    with record_selections() as ran:
        attention(q, q, q)
    assert (ran[0].backend, ran[0].reason) == (told.backend, told.reason)


def test_a_choice_made_without_a_figure_is_made_again(prober: StandIn) -> None:
    small = DENSE.with_(q_len=128, kv_len=128)
    prober.refuses = "something is going on"
    assert chosen(small).backend == "sdpa_flash"
    epoch, prober.refuses = scopes.state.epoch, None
    chosen()
    assert scopes.state.epoch != epoch and chosen(small).backend == "native_cpu"
    assert chosen(small.with_(dtype="bfloat16")).backend == "native_cpu"


def test_nothing_is_forgotten_where_torch_s_kernel_stays(prober: StandIn) -> None:
    prober.ratios = dict.fromkeys(KINDS, 0.8)
    settings.current()
    epoch = scopes.state.epoch
    assert chosen().backend == "sdpa_flash" and scopes.state.epoch == epoch


def test_measured_times_win_over_it(prober: StandIn) -> None:
    real = platform_of("torch")
    key = lookup.key_for(DENSE, real.device_description("cpu"), real.versions())
    row = Measurement("sdpa_math", "{}", 2e-9, 1e-9, 3e-9, 9, 0.0, 1.0, True)
    lookup.table().record(key, [row])
    assert chosen().source == "TUNED" and prober.asked == []


# When it does not --------------------------------------------------------------------------------


def test_calls_that_must_not_wait_do_not_calibrate(
    prober: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = DENSE.with_(q_len=64, kv_len=64)
    for problem in (
        DENSE.with_(compiled=True),
        small,
        DENSE.with_(dtype="float64"),
        DENSE.with_(softcap=1.0),
        DENSE.with_(dropout_p=0.5),
    ):
        chosen(problem)
        assert prober.asked == []
    for asked in (("sdpa_math",), ("native_cpu",)):
        select_here(DENSE, Wishes(call=Request(asked)))
        assert prober.asked == []
    select_here(DENSE, Wishes(left=frozenset({"sdpa_flash"})))
    select_here(DENSE, Wishes(layer=frozenset({"sdpa_flash"})))
    monkeypatch.setenv("POLYATTN_CALIBRATION", "off")
    found = chosen()
    assert (found.backend, prober.asked) == ("sdpa_flash", [])
    assert found.reason == "not measured on this processor; torch's own kernel"


def test_switched_off_what_was_calibrated_takes_no_part(
    prober: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen().backend == "native_cpu"
    monkeypatch.setenv("POLYATTN_CALIBRATION", "off")
    assert chosen().backend == "sdpa_flash"


def test_a_machine_of_a_record_is_calibrated_for_what_that_lacks(
    prober: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober.where = Machine("GenuineIntel", 6, "amx", "2.13", 2, "avx512bf16")
    record = shipped.find(prober.where)
    assert record is not None
    lacking = {"small decode", "small", "short decode", "decode", "long decode"}
    figures = {key: one for key, one in record.figures.items() if key[1] not in lacking}
    monkeypatch.setattr(shipped, "shipped", lambda: (replace(record, figures=figures),))
    assert "Intel Xeon with AMX" in chosen().reason and prober.asked == []
    decoding = DENSE.with_(heads=4, kv_heads=4, q_len=1, kv_len=1 << 15)
    assert "measured here" in chosen(decoding).reason
    assert prober.asked == [
        ("float32", "small decode"),
        ("float32", "small"),
        ("float32", "short decode"),
        ("float32", "decode"),
    ]


# Faults ------------------------------------------------------------------------------------------


def test_an_interrupt_propagates_and_leaves_nothing_half(prober: StandIn) -> None:
    def third_kind() -> None:
        if len(prober.asked) == 3:
            raise KeyboardInterrupt

    prober.on_call = third_kind
    with pytest.raises(KeyboardInterrupt):
        chosen()
    assert of_machine.this_machine().figures == {} and kept_rows() == []
    assert not calibration._lock.locked()
    prober.on_call = lambda: None
    as_in_a_new_process()
    assert chosen().backend == "native_cpu"


def test_a_busy_machine_gives_torch_s_choice_and_is_not_kept(prober: StandIn) -> None:
    prober.is_busy = True
    found = chosen()
    assert found.backend == "sdpa_flash"
    assert found.reason == f"{BUSY}; torch's own kernel"
    assert kept_rows() == [] and len(prober.asked) == 1  # the others would fare no better
    chosen()
    assert len(prober.asked) == 1  # not again at once
    prober.is_busy = False
    of_machine.kept._tries = {
        key: (count, -1e9) for key, (count, _) in of_machine.kept._tries.items()
    }
    assert chosen().backend == "native_cpu" and len(kept_rows()) == 2 * len(BESIDE)


def test_it_is_tried_a_few_times_only(prober: StandIn) -> None:
    prober.is_busy = True
    for _ in range(20):
        chosen()
        of_machine.kept._tries = {
            key: (count, -1e9) for key, (count, _) in of_machine.kept._tries.items()
        }
    assert len(prober.asked) == 5


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), SystemExit(3)], ids=repr)
def test_a_kernel_s_fault_is_none_of_the_call(prober: StandIn, error: BaseException) -> None:
    prober.raises = error
    found = chosen()
    assert found.backend == "sdpa_flash" and type(error).__name__ in found.reason
    assert kept_rows() == []


def test_results_that_differ_are_no_evidence(prober: StandIn) -> None:
    for wrong in (0.5, float("nan")):
        prober.error = wrong
        as_in_a_new_process()
        found = chosen()
        assert found.backend == "sdpa_flash" and "native_cpu and sdpa_flash differ" in found.reason
        assert kept_rows() == []


@pytest.mark.parametrize("kind", ["read-only", "a file", "a damaged table"])
def test_without_a_table_it_is_done_once_in_a_process(
    prober: StandIn, cache: Path, kind: str
) -> None:
    if kind == "a damaged table":
        cache.mkdir()
        (cache / "tuning.sqlite3").write_bytes(b"nothing of the kind" * 100)
    elif kind == "a file":
        cache.write_text("in the way")
    else:
        cache.parent.chmod(0o555)
    try:
        if kind == "read-only" and _can_write(cache.parent):
            pytest.skip("this user may write everywhere")
        assert chosen().backend == "native_cpu"
        count = len(prober.asked)
        assert chosen(DENSE.with_(q_len=500)).backend == "native_cpu"
        assert len(prober.asked) == count
    finally:
        cache.parent.chmod(0o755)


def _can_write(folder: Path) -> bool:
    with suppress(OSError):
        (folder / "try").touch()
        return True
    return False


def test_other_threads_or_processors_are_another_machine(
    prober: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = platform_of("torch")
    chosen()
    count = len(prober.asked)
    changed = real.device_description("cpu").replace("threads=", "threads=1")
    parts = {name: getattr(real, name) for name in real.__dataclass_fields__}
    register_platform(Platform(**{**parts, "device_description": lambda kind: changed}))
    assert chosen().backend == "native_cpu" and len(prober.asked) == 2 * count
    assert {key.device for key, _ in kept_rows()} == {
        device_of(real.device_description("cpu")),
        device_of(changed),
    }


def test_rows_that_make_no_sense_are_passed_over(prober: StandIn) -> None:
    real = platform_of("torch")
    device = device_of(real.device_description("cpu"))
    for config in (
        '{"calibration":"nonsense","dtype":"float32"}',
        '{"calibration":[],"dtype":"float32"}',
        '{"dtype":3}',
    ):
        key = lookup.Key(device, real.versions(), DENSE.to_json())
        one = Measurement("native_cpu", config, 1.0, 1.0, 1.0, 2, 0.0, 1.0, True)
        two = Measurement("sdpa_flash", config, 9.0, 9.0, 9.0, 2, 0.0, 1.0, True)
        lookup.table().record(key, [one, two])
    assert of_machine.this_machine().figures == {}
    assert chosen().backend == "native_cpu" and prober.asked


def test_two_threads_at_once_calibrate_once_and_nobody_waits(prober: StandIn) -> None:
    inside, go_on = Event(), Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(60)

    prober.on_call = wait
    found: list[Selection] = []
    first = Thread(target=lambda: found.append(chosen()))
    first.start()
    assert inside.wait(60)
    meanwhile = chosen()
    assert meanwhile.backend == "sdpa_flash" and "not measured" in meanwhile.reason
    go_on.set()
    first.join()
    assert found[0].backend == chosen().backend == "native_cpu"
    assert len(prober.asked) == len(BESIDE)


def test_the_rows_are_shown_like_others(prober: StandIn, capsys: Any) -> None:
    chosen()
    assert main(["--show", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * len(BESIDE) and all(row["verified"] for row in rows)
    assert main(["--show"]) == 0
    assert "calibration" in capsys.readouterr().out
