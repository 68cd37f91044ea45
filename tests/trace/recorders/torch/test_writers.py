"""Three writers of lines, one text: `line_of` of a record, `Lines` in Python, and native code.

Rows are made of numbers, not of tensors, so that each place has every value that it could have.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from polyattn.trace import STATISTICS, TraceWriter, line_of, read
from polyattn.trace.recorders.torch.device_rows import RowPool, Rows
from polyattn.trace.recorders.torch.lines import Lines, head_of
from polyattn.trace.recorders.torch.tensor_statistics import native_module, record_fields
from polyattn.trace.statistics.schema import COUNTS, MOMENTS, REMEMBERED, SAMPLES, SKETCH, WIDTH
from polyattn.trace.statistics.sketch_text import unpack

NAMES = tuple(name for name in STATISTICS if name not in ("shape", "dtype"))
DTYPES = [one for one in vars(torch).values() if isinstance(one, torch.dtype)]
WAYS = ("python", *(("native",) if native_module() is not None else ()))

ODD = [
    0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, -2.2250738585072014e-308, 3.4e38, 7.0, 1e22,
    1.7976931348623157e308, 1e16, 123456789.5, 0.1, 1 / 3, -1e-5, 1e-4, 99999999.95, 999999999.5,
    2.0**53,
]  # fmt: skip
"""Where texts of numbers change their form: exponents, whole numbers, halves of the last digit."""

TEXTS = [
    "",
    "blocks.0",
    'a"\\/\b\f\n\r\t',
    "ä",
    "\x7f\x00",
    "😀",
    "\u2028",
    "half \ud800",
    "x" * 999,
]
EXTRAS: list[dict[str, Any]] = [
    {}, {"note": 'ä"\n'}, {"errors": {"f": "ValueError: ☃"}}, {"mean": 1 / 3, "flag": True},
    {"file": "run.tensors/1.safetensors", "q": 0.25, "deep": {"a": [1, None]}},
]  # fmt: skip


def a_number(rng: random.Random) -> float:
    return rng.choice([
        lambda: rng.choice(ODD), lambda: rng.gauss(0, 1),
        lambda: float(rng.randint(-(2**53), 2**53)),
        lambda: float(np.float32(rng.gauss(0, 1) * 10.0 ** rng.randint(-40, 37))),
        lambda: rng.gauss(0, 1) * 10.0 ** rng.randint(-320, 307),
    ])()  # fmt: skip


def a_row(rng: random.Random) -> list[float]:
    """Most rows are plain, so that native code writes them; in some any number is odd."""
    usual = rng.random() < 0.6
    number = (lambda: rng.choice([x for x in ODD if x - x == 0])) if usual else None
    row = [0.0] * WIDTH
    row[: len(COUNTS)] = [float(rng.choice([0, 1, 7, 10**9, 2**53])) for _ in COUNTS]
    at = slice(len(COUNTS), SAMPLES.stop)
    row[at] = [(number or (lambda: a_number(rng)))() for _ in row[at]]
    scale = rng.choice([0.0, 1.0, 2.0**-64, 2.0**126, 1e-30, 2.0**127, 1e300, 5e-324])
    row[SKETCH] = [rng.choice([-1.0, 1.0, rng.random()]) * scale for _ in row[SKETCH]]
    return row


def a_record(rng: random.Random, seq: int) -> dict[str, Any]:
    """What is to be written: all but the statistics, and the row that has them, or none."""
    whole = rng.random() < 0.9
    return {
        "module": rng.choice(TEXTS), "cls": rng.choice(TEXTS), "call": rng.randint(0, 10**12),
        "step": rng.choice([None, 0, 3, -(2**40), 2**70]), "phase": rng.choice(["in", "grad_out"]),
        "tensor": rng.choice(TEXTS), "dtype": rng.choice(DTYPES),
        "shape": torch.Size(rng.choice([(), (0,), (1,), (3, 5), (2**40, 0), (1,) * 12])),
        "row": a_row(rng) if whole else None, "extra": rng.choice([{}, {}, {}, *EXTRAS]),
        "same": rng.randrange(seq) if seq and rng.random() < 0.1 else None,
    }  # fmt: skip


def some_records(seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    for seq in range(count):
        one = a_record(rng, seq)
        if found and rng.random() < 0.25:  # a tensor that was there before, from another place
            again = rng.choice(found)
            one |= {name: again[name] for name in ("shape", "dtype", "row")}
        found.append(one)
    return found


def by_lines(
    records: list[dict[str, Any]], names: tuple[str, ...], rank: int, way: str, batch: int
) -> bytes:
    """The lines as the recorder of torch has them made, so many records at a time."""
    pool, out = RowPool(), []
    lines = Lines(names, rank, pool, native=None if way == "native" else False)
    for start in range(0, len(records), batch):
        rows, events = pool.take(torch.device("cpu")), []
        for seq, one in enumerate(records[start : start + batch], start):
            events.append(_event(seq, one, rows))
        for made in lines.of(events, [rows]):
            out.append(made if isinstance(made, bytes) else made.encode() + b"\n")
    return b"".join(out)


def _event(seq: int, one: dict[str, Any], rows: Rows) -> Any:
    place = (seq, head_of(one["module"], one["cls"]), one["call"], one["step"], one["phase"])
    place += (one["tensor"],)
    if one["same"] is not None:
        return (*place, None, None, None, 0, one["same"], one["extra"] or None, None)
    slot, held = rows.used, None
    if one["row"] is not None:
        rows.buffer[slot] = torch.tensor(one["row"], dtype=torch.float64)
        held, rows.used = rows, slot + 1
    return (*place, one["shape"], one["dtype"], held, slot, None, one["extra"] or None, None)


def by_record(records: list[dict[str, Any]], names: tuple[str, ...], rank: int) -> bytes:
    """The lines as the format defines them: `line_of` of plain data, each with its statistics."""
    first: dict[Any, int] = {}
    leads: dict[int, int] = {}
    out = []
    for seq, one in enumerate(records):
        made = {"seq": seq} | {name: one[name] for name in ("module", "cls", "call", "step")}
        made |= ({"rank": rank} if rank else {}) | {n: one[n] for n in ("phase", "tensor")}
        same = one["same"]
        if same is not None:
            same = leads.get(same, same)
        elif one["row"] is not None:
            key = (one["shape"], one["dtype"], np.array(one["row"]).tobytes())
            if (same := first.setdefault(key, seq)) != seq:
                leads[seq] = same
            else:
                same = None
        if same is not None:
            made["same"] = same
        else:
            made |= {"shape": one["shape"], "dtype": str(one["dtype"]).removeprefix("torch.")}
            if one["row"] is not None:
                fields = record_fields(one["row"])
                made |= {name: fields[name] for name in names}
        # further fields have 9 digits in any record, and a name may stand a second time: as text
        text = line_of(made)[:-1]
        out.append(text + (f",{line_of(one['extra'])[1:]}" if one["extra"] else "}"))
    return "\n".join([*out, ""]).encode()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "names", [NAMES, ("sum",), ("sketch",), ("samples",), ("n", "l2"), ()], ids=",".join
)
def test_every_writer_writes_the_same_bytes(names: tuple[str, ...], way: str) -> None:
    for seed in range(6):
        records = some_records(seed, 150)
        expected = by_record(records, names, seed % 2).split(b"\n")
        found = by_lines(records, names, seed % 2, way, batch=(1, 7, 100)[seed % 3]).split(b"\n")
        for one, other in zip(found, expected, strict=True):
            assert one == other
        assert sum(b'"same":' in line for line in found) > 10


@pytest.mark.parametrize("way", WAYS)
def test_each_place_has_each_odd_number(way: str) -> None:
    """One number at a time, in a row that is plain without it, and each dtype."""
    records = []
    for place in range(SAMPLES.stop):
        for value in ODD if place >= len(COUNTS) else (0.0, 1.0, 2.0**53):
            row = [1.0] * WIDTH
            row[place] = value
            records.append(a_record(random.Random(0), 0) | {"row": row, "same": None, "extra": {}})
    for dtype in DTYPES:
        records.append(records[0] | {"row": [0.1] * WIDTH, "dtype": dtype})
        records[-1]["row"][: len(COUNTS)] = [3.0] * len(COUNTS)
    made = by_lines(records, NAMES, 0, way, batch=64)
    assert made == by_record(records, NAMES, 0)
    assert b'"row"' not in made and made.count(b"\n") == len(records)


@pytest.mark.parametrize("way", WAYS)
def test_sketches_of_any_size(way: str) -> None:
    records = []
    for exponent in [*range(-1074, 1024, 41), -65, -64, -63, 126, 127, 128, 1023]:
        for factor in (1.0, -1.0, 1.9999999999999998):
            row = [1.0] * WIDTH
            row[SKETCH] = [
                math.ldexp(factor, exponent) * (i % 3 - 1) for i in range(len(row[SKETCH]))
            ]
            records.append(a_record(random.Random(1), 0) | {"row": row, "same": None, "extra": {}})
    made = by_lines(records, ("sketch",), 0, way, batch=64)
    assert made == by_record(records, ("sketch",), 0)
    for line, one in zip(made.splitlines(), records, strict=True):
        if b'"same":' not in line:
            text = line.decode().rpartition('"sketch":"')[2].removesuffix('"}')
            assert unpack(text) == pytest.approx(one["row"][SKETCH], rel=1e-7, abs=5e-324)


def test_what_is_written_is_read_again(tmp_path: Any) -> None:
    """With names that no reader refuses; the numbers are those of the row."""
    records = [
        one | {"module": "m", "tensor": f"out[{seq}]", "shape": torch.Size([int(one["row"][0])])}
        for seq, one in enumerate(some_records(3, 60))
        if one["row"] is not None and one["row"][0] < 2**40
    ]
    for one in records:
        one["row"][1 : len(COUNTS)] = [0.0] * (len(COUNTS) - 1)
        one |= {"dtype": torch.float64, "same": None, "cls": "C", "extra": {}, "step": 3}
    path = tmp_path / "run.jsonl"
    with TraceWriter(path, framework="torch") as trace:
        header = trace.header.line()
    lines = by_lines(records, NAMES, 0, WAYS[-1], batch=20)
    path.write_bytes(header.encode() + b"\n" + lines)
    for record, one in zip(read(path).records, records, strict=True):
        fields = record_fields(one["row"])
        for name in MOMENTS:
            value = fields[name] if fields[name] is None or math.isfinite(fields[name]) else None
            assert getattr(record, name) == value


def test_all_remember_as_many_tensors(tmp_path: Any) -> None:
    """Of more than are remembered that come twice, some are found again and some are forgotten."""
    more = REMEMBERED + 900
    values = [*range(more), *range(more - 1000, more), *range(REMEMBERED - 1200)]
    plain = a_record(random.Random(0), 0) | {"same": None, "extra": {}, "shape": torch.Size([1])}
    plain |= {"dtype": torch.float32, "module": "m", "cls": "", "tensor": "out"}
    records = [plain | {"row": [1.0, *[0.0] * 4, float(v), *[0.0] * (WIDTH - 6)]} for v in values]
    texts = [by_lines(records, ("min",), 0, way, batch=200) for way in WAYS]
    assert len(set(texts)) == 1 and texts[0].count(b'"same":') == 1000
    with TraceWriter(tmp_path / "run.jsonl", framework="numpy") as trace:
        for one in records:
            found = {"shape": [1], "dtype": "float32"} | record_fields(one["row"])
            trace.add("m", "out", "out", found)
    assert (tmp_path / "run.jsonl").read_bytes().count(b'"same":') == 1000
