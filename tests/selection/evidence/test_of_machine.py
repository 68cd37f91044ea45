"""What is chosen on machines that are not here: by the shipped record that fits, or by none."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from polyattn import Facts, Problem
from polyattn.problem import MaskFacts
from polyattn.selection import Selection, Source
from polyattn.selection.evidence import UNMEASURED, Evidence, Figure, Machine, shipped
from polyattn.selection.evidence.problem_kinds import is_small, kind_of
from polyattn.selection.evidence.shipped import find
from polyattn.selection.heuristics import EVIDENCE, ROWS
from polyattn.selection.prepare import select_here
from polyattn.selection.registry import registry
from polyattn.selection.select import select
from polyattn.selection.wishes import Wishes
from polyattn.torch import explain

DENSE = Problem(batch=1, q_len=4096, kv_len=4096, heads=8, kv_heads=8, head_dim=64, layout="BNTH")
DECODE = DENSE.with_(q_len=1, heads=32, kv_heads=8, head_dim=128, value_dim=128)
CAUSAL = DENSE.with_(mask=MaskFacts.parse("Causal('top_left')", "top_left"))
WINDOW = DENSE.with_(mask=MaskFacts.parse("Causal() & Window(left=255, right=None)", None))
ONE_HEAD_EACH = DECODE.with_(kv_heads=DECODE.heads, kv_len=1024)
LONG = ONE_HEAD_EACH.with_(kv_len=1 << 14)
PADDED = MaskFacts.parse("Padding()", None)

RECORDS = files("polyattn.selection.evidence") / "records"

ZEN4 = Machine("AuthenticAMD", 25, "avx512bf16", "2.13", 2, "avx512bf16")
AMX = Machine("GenuineIntel", 6, "amx", "2.13", 2, "avx512bf16")
ZEN5 = Machine("AuthenticAMD", 26, "avx512bf16", "2.13", 2, "avx512bf16")
ZEN3 = Machine("AuthenticAMD", 25, "avx2", "2.13", 2, "avx2")
GRAVITON = Machine("ARM", 0xD40, "sve", "2.13", 2, "neon")


def on(facts: str, problem: Problem, **packages: str) -> Selection:
    return select_here(problem, Wishes(), Facts.parse(facts, packages or None))


@pytest.mark.parametrize(
    ("facts", "problem", "dtype", "chosen"),
    [
        ("sapphirerapids", DENSE, "float32", "native_cpu"),
        ("sapphirerapids", CAUSAL, "float32", "native_cpu"),
        ("sapphirerapids", DENSE, "float16", "native_cpu"),
        ("sapphirerapids", DENSE, "bfloat16", "native_cpu"),
        ("sapphirerapids", CAUSAL, "bfloat16", "native_cpu"),
        ("sapphirerapids", DENSE.with_(batch=8, q_len=197, kv_len=197), "bfloat16", "native_cpu"),
        ("sapphirerapids", DENSE.with_(head_dim=128, value_dim=128), "bfloat16", "native_cpu"),
        ("sapphirerapids", ONE_HEAD_EACH, "bfloat16", "native_cpu"),
        ("sapphirerapids", ONE_HEAD_EACH, "float32", "native_cpu"),
        ("sapphirerapids", ONE_HEAD_EACH.with_(kv_len=200), "bfloat16", "native_cpu"),
        ("sapphirerapids", ONE_HEAD_EACH.with_(kv_len=200), "float32", "native_cpu"),
        ("sapphirerapids", LONG, "bfloat16", "native_cpu"),
        ("sapphirerapids", LONG, "float32", "native_cpu"),
        ("sapphirerapids", ONE_HEAD_EACH.with_(mask=PADDED), "bfloat16", "native_cpu"),
        ("sapphirerapids", ONE_HEAD_EACH.with_(mask=PADDED), "float32", "native_cpu"),
        ("sapphirerapids", DECODE, "bfloat16", "native_cpu"),
        ("sapphirerapids", DECODE, "float32", "native_cpu"),
        ("sapphirerapids", WINDOW, "bfloat16", "native_cpu"),
        ("zen4", DENSE, "float32", "native_cpu"),
        ("zen4", DENSE, "bfloat16", "native_cpu"),
        ("zen4", DECODE, "bfloat16", "native_cpu"),
        ("zen4", DENSE, "float16", "native_cpu"),
        ("zen4", DECODE.with_(kv_heads=DECODE.heads), "bfloat16", "native_cpu"),
        ("zen3", DENSE, "float32", "native_cpu"),
        ("zen3", DENSE.with_(head_dim=128, value_dim=128), "float32", "sdpa_flash"),
        ("haswell", DENSE, "float32", "sdpa_flash"),  # AVX2 of another vendor
        ("graviton3", DENSE, "float32", "sdpa_flash"),
        ("cpu", DENSE, "float32", "sdpa_flash"),
        ("cpu:avx512_bf16", DENSE, "bfloat16", "sdpa_flash"),  # of any vendor
    ],
)
def test_what_is_chosen_elsewhere(facts: str, problem: Problem, dtype: str, chosen: str) -> None:
    found = on(facts, problem.with_(dtype=dtype))
    assert (found.backend, found.source) == (chosen, Source.HEURISTIC), str(found)
    assert explain(problem.with_(dtype=dtype), facts=Facts.parse(facts)).reason == found.reason


def test_the_reason_names_the_record_its_command_and_its_hardware() -> None:
    zen4 = on("zen4", DENSE.with_(dtype="bfloat16")).reason
    low, median, high = _figures("amd-zen4", "bfloat16", "dense")
    assert f"{median} x torch's kernel on dense bfloat16 problems ({low} - {high}), by" in zen4
    assert "`polyattn bench harm --record`" in zen4
    assert "AMD EPYC of Zen 4" in zen4 and "2 threads, torch 2.13.0+cpu" in zen4
    amx = on("sapphirerapids", DENSE.with_(dtype="bfloat16")).reason
    low, median, high = _figures("intel-amx", "bfloat16", "dense")
    measured = f"{median} x torch's kernel on dense bfloat16 problems ({low} - {high}), by"
    assert amx.startswith(f"{measured} `polyattn bench harm")
    assert "Intel Xeon with AMX" in amx
    window = on("zen3", WINDOW.with_(head_dim=128, value_dim=128)).reason
    otherwise = f"otherwise {_figures('amd-avx2', 'float32', 'wide')[1]} x"
    assert f"tiles that the mask empties are skipped, at most 19% remain; {otherwise}" in window
    assert "`polyattn bench harm --record` on AMD EPYC with AVX2" in on("zen3", DENSE).reason
    assert on("graviton3", DENSE).reason == (
        "no record of such a machine is shipped; torch's own kernel"
    )


def _figures(record: str, dtype: str, kind: str) -> list[str]:
    """Return low, median and high of a record that is shipped, as a reason says them."""
    text = RECORDS.joinpath(f"{record}.json").read_text(encoding="utf-8")
    made = json.loads(text)["figures"][dtype][kind]
    return [f"{made[name]:.3g}" for name in ("low", "median", "high")]


def test_the_reason_says_what_was_measured_where_that_does_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = find(AMX)
    assert record is not None
    figures = dict(record.figures) | {("bfloat16", "decode"): Figure(0.9, 1.1, 1.3, "a test")}
    monkeypatch.setattr(shipped, "shipped", lambda: (replace(record, figures=figures),))
    measured = "1.1 x torch's kernel on decoding bfloat16 problems (0.9 - 1.3), a test"
    decoding = ONE_HEAD_EACH.with_(dtype="bfloat16")
    found = on("sapphirerapids", decoding)
    assert found.backend == "sdpa_flash"
    assert found.reason.startswith(f"torch's own kernel; native_cpu: {measured}")
    padded = on("sapphirerapids", decoding.with_(mask=PADDED))
    made = "torch's kernel would be given the mask as an array, made in each call"
    assert padded.backend == "native_cpu"
    assert padded.reason.startswith(f"{made}; otherwise {measured}")


def test_long_decoding_has_a_figure_of_its_own_or_that_of_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = find(AMX)
    assert record is not None
    torchs = Figure(0.7, 0.9, 1.0, "a test")
    figures = dict(record.figures) | {("bfloat16", "decode"): torchs}
    figures["bfloat16", "long decode"] = Figure(1.3, 1.4, 1.5, "a test")
    monkeypatch.setattr(shipped, "shipped", lambda: (replace(record, figures=figures),))
    cached, long = (p.with_(dtype="bfloat16") for p in (ONE_HEAD_EACH, LONG))
    assert on("sapphirerapids", cached).backend == "sdpa_flash"
    found = on("sapphirerapids", long)
    assert found.backend == "native_cpu"
    assert found.reason.startswith("1.4 x torch's kernel on decoding from beyond the caches")
    del figures["bfloat16", "long decode"]
    found = on("sapphirerapids", long)
    assert found.backend == "sdpa_flash" and "0.9 x torch's kernel" in found.reason


def test_decoding_with_few_keys_has_a_figure_of_its_own_or_that_of_an_older_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = find(AMX)
    assert record is not None
    figures = dict(record.figures) | {("float32", "decode"): Figure(1.3, 1.4, 1.5, "a test")}
    figures["float32", "short decode"] = Figure(0.7, 0.9, 1.0, "a test")
    monkeypatch.setattr(shipped, "shipped", lambda: (replace(record, figures=figures),))
    few, many = ONE_HEAD_EACH.with_(kv_len=512, dtype="float32"), ONE_HEAD_EACH
    assert on("sapphirerapids", many.with_(dtype="float32")).backend == "native_cpu"
    found = on("sapphirerapids", few)
    assert found.backend == "sdpa_flash"
    assert "0.9 x torch's kernel on decoding with few keys (at most 512)" in found.reason
    del figures["float32", "short decode"]
    found = on("sapphirerapids", few)
    assert found.backend == "native_cpu" and found.reason.startswith("1.4 x torch's kernel")


def test_what_the_record_of_such_a_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = find(AMX)
    assert amx is not None
    figures = {key: figure for key, figure in amx.figures.items() if key[1] != "train"}
    monkeypatch.setattr(shipped, "shipped", lambda: (replace(amx, figures=figures),))
    trained = DENSE.with_(dtype="bfloat16", grad=True)
    assert "(intel-amx) has no such problem" in on("sapphirerapids", trained).reason


def test_only_a_record_of_the_same_machine_counts() -> None:
    assert find(ZEN4).name == "amd-zen4" and find(AMX).name == "intel-amx"
    assert find(ZEN3).name == "amd-avx2" and find(ZEN5).name == "amd-zen5"
    others = [
        Machine("AuthenticAMD", 23, "avx2", "2.13", 2, "avx2"),  # Zen 2
        GRAVITON, Machine(None, None, None), Machine(None, None, "avx512bf16", "2.13", 2),
        Machine("AuthenticAMD", 26, "avx2", "2.13", 2, "avx2"),  # no Zen 5 that is known
        Machine("GenuineIntel", 6, "avx512bf16", "2.13", 2),  # Cooper Lake
        Machine("AuthenticAMD", 25, "avx512bf16", "2.13", 2, "avx2"),  # POLYATTN_NATIVE_ISA
    ]  # fmt: skip
    assert [find(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("torch", "threads", "zen4", "amx"),
    [
        ("2.13", 1, True, True), ("2.13", 2, True, True), ("2.13", 64, False, False),
        ("2.9", 2, False, False), ("2.15", 2, False, False), (None, None, True, True),
    ],
)  # fmt: skip
def test_a_record_counts_for_its_releases_and_threads(
    torch: str | None, threads: int | None, zen4: bool, amx: bool
) -> None:
    for machine, fits in ((ZEN4, zen4), (AMX, amx)):
        told = Machine(machine.vendor, machine.family, machine.level, torch, threads)
        assert (find(told) is not None) is fits


def test_bfloat16_figures_are_those_of_the_form_that_runs() -> None:
    amx = find(AMX)
    other = Machine("GenuineIntel", 6, "amx", "2.13", 2, "avx512bf16", "avx512")
    assert find(other) is amx and amx.figures_for(AMX) == amx.figures
    left = {kind for dtype, kind in amx.figures_for(other) if dtype == "bfloat16"}
    decoding = {"decode", "long decode", "short decode", "grouped decode", "small decode"}
    assert left == decoding
    assert ("float32", "dense") in amx.figures_for(other)


def test_facts_may_tell_the_release_of_torch() -> None:
    assert on("zen4", DENSE, torch="2.13.1").backend == "native_cpu"
    assert on("zen4", DENSE, torch="2.9.0").backend == "sdpa_flash"
    named = Facts("cpu", None, Facts.parse("zen4").instructions, vendor="AuthenticAMD", family=25)
    assert explain(DENSE, facts=named).backend == "native_cpu"


def test_all_lengths_of_a_class_get_the_same_choice() -> None:
    half = Evidence({("float32", "dense"): Figure(0.5, 0.5, 0.5, "a test")})
    for masked in (DENSE, CAUSAL, WINDOW, DECODE.with_(grad=True)):
        for low, high in ((1025, 2048), (513, 1024), (2, 2), (17, 32)):
            found = {
                select(masked.with_(kv_len=n), Wishes(), registry, evidence=half).backend
                for n in (low, (low + high) // 2, high)
            }
            assert len(found) == 1, (masked, low, high)


def test_slower_kernels_run_only_where_a_static_mask_pays_for_it() -> None:
    def chosen(mask: str, low: float) -> str:
        known = Evidence({("float32", "dense"): Figure(low, low, low, "a test")})
        problem = DENSE.with_(mask=MaskFacts.parse(mask, None))
        return select(problem, Wishes(), registry, evidence=known).backend

    narrow, wide = "Window(left=255, right=0)", "Window(left=1999, right=0)"
    assert chosen(narrow, 0.3) == "native_cpu" and chosen(wide, 0.3) == "sdpa_flash"
    assert chosen(narrow, 0.2) == "sdpa_flash"
    assert chosen(wide, 0.96) == "native_cpu"  # as fast without a mask, and torch must read one
    for unknown in (
        "BlockMap(64, 64, 1x1x2x3)",
        f"{narrow} | Causal()",
        f"{narrow} & Padding(q=None, kv=1)",
    ):
        assert chosen(unknown, 0.3) == "sdpa_flash" and chosen(unknown, 1.1) == "native_cpu"


def test_faster_means_faster_as_a_rule_and_nowhere_slower_by_five_per_cent() -> None:
    def chosen(low: float, median: float) -> str:
        known = Evidence({("float32", "dense"): Figure(low, median, 2.0, "a test")})
        return select(DENSE, Wishes(), registry, evidence=known).backend

    assert chosen(0.96, 1.1) == "native_cpu"
    assert chosen(0.9, 1.3) == chosen(1.0, 1.0) == chosen(0.5, 0.6) == "sdpa_flash"


def test_without_evidence_torch_s_own_kernel_runs_unless_it_cannot() -> None:
    found = select(DENSE, Wishes(), registry, evidence=UNMEASURED)
    assert found.backend == "sdpa_flash"
    assert found.reason == "not measured on this processor; torch's own kernel"
    for cannot in ({"softcap": 5.0}, {"sinks": 1, "sinks_grad": True, "grad": True}):
        assert select(DENSE.with_(**cannot), Wishes(), registry).backend == "native_cpu"
    neither = DENSE.with_(lse=True, head_dim=64, value_dim=32)  # sdpa_math gives no lse
    found = select(neither, Wishes(), registry)
    assert (found.backend, found.reason) == ("native_cpu", "torch's own function cannot run it")
    small = select(DENSE.with_(q_len=8, kv_len=8), Wishes(), registry)
    assert small.backend == "sdpa_flash" and "math path" in small.reason


def test_rows_say_what_they_rest_on() -> None:
    native = next(row for row in ROWS if row.name == "cpu, native kernels")
    assert native.rests_on is EVIDENCE and "vendor, family and instruction sets" in EVIDENCE
    assert all(
        row.rests_on or "not measured" in row.reason or "cannot" in row.name or "sinks" in row.name
        for row in ROWS
    )


def test_every_row_of_the_heuristics_says_what_it_rests_on() -> None:
    assert [row.name for row in ROWS if not row.rests_on] == []


def test_small_compiled_calls_take_the_operator_only_where_it_pays() -> None:
    small = DENSE.with_(q_len=1, kv_len=64, compiled=True)
    kind = "float32", kind_of(small)
    assert is_small(small) and not is_small(DENSE)

    def chosen(low: float) -> str:
        known = Evidence({kind: Figure(low, low + 0.5, low + 1, "a test")})
        return select(small, Wishes(), registry, evidence=known).backend

    assert chosen(1.4) == "sdpa_flash" and chosen(1.6) == "native_cpu"
    found = select(small, Wishes(), registry, evidence=UNMEASURED)
    assert found.backend == "sdpa_flash" and "torch's own operator sooner" in found.reason


def test_small_training_in_float32_is_a_kind_of_its_own() -> None:
    figure = Figure(1.2, 2, 3, "a test")
    known = {(d, "train"): figure for d in ("float32", "bfloat16")}
    more = {**known, ("float32", "small train"): figure}

    def chosen(problem: Problem, figures: Any = known) -> str:
        return select(problem, Wishes(), registry, evidence=Evidence(figures)).backend

    few = DENSE.with_(batch=64, q_len=32, kv_len=32, grad=True)
    sizes = {"q_len": 65, "kv_len": 65, "heads": 4, "kv_heads": 4, "head_dim": 32, "value_dim": 32}
    short = DENSE.with_(batch=2, grad=True, **sizes)
    dense = few.with_(mask=MaskFacts.parse("Dense(64x1x32x32)", None))
    for problem in (few, short, short.with_(kv_heads=2), few.with_(mask=CAUSAL.mask), dense):
        assert chosen(problem) == "sdpa_flash"
        assert chosen(problem, more) == "native_cpu" == chosen(problem.with_(dtype="bfloat16"))
    window = few.with_(mask=MaskFacts.parse("Window(left=3, right=0)", None))
    assert chosen(window) == "native_cpu" == chosen(DENSE.with_(q_len=256, kv_len=256, grad=True))


def test_tiny_training_stays_with_torch_s_kernel_unless_it_would_be_given_an_array() -> None:
    figure = Figure(1.2, 2, 3, "a test")
    dtypes, kinds = ("float32", "bfloat16"), ("train", "small train")
    known = Evidence({(dtype, kind): figure for dtype in dtypes for kind in kinds})
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "head_dim": 16, "value_dim": 16, "grad": True}

    def chosen(length: int, dtype: str = "float32", **changes: Any) -> str:
        problem = DENSE.with_(q_len=length, kv_len=length, dtype=dtype, **sizes).with_(**changes)
        return select(problem, Wishes(), registry, evidence=known).backend

    assert chosen(16) == chosen(16, mask=CAUSAL.mask) == chosen(16, kv_heads=2) == "sdpa_flash"
    assert chosen(8, "bfloat16") == "sdpa_flash" and chosen(16, "bfloat16") == "native_cpu"
    assert chosen(32) == "sdpa_flash" and chosen(64) == "native_cpu"
    for mask in ("Dense(2x1x16x16)", "Window(left=3, right=0)"):
        assert chosen(16, mask=MaskFacts.parse(mask, None)) == "native_cpu"
