"""What native code does for a trace is what Python does where it is not built: the same bytes."""

import random

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from polyattn.hooks import trace
from polyattn.trace import STATISTICS, JsonlSink, read
from polyattn.trace.recorders.torch.device_rows import RowPool
from polyattn.trace.recorders.torch.full_tensors import TensorFolder
from polyattn.trace.recorders.torch.lines import Lines, head_of
from polyattn.trace.recorders.torch.tensor_statistics import native_module
from polyattn.trace.statistics.schema import PLACES

pytestmark = pytest.mark.skipif(native_module() is None, reason="the extension is not built")

ALL = tuple(name for name in STATISTICS if name not in ("shape", "dtype"))
PATHS = ("args[0]", "out", "kwargs.mask", 'out["ä\\"]', "half \ud800", "out[1]")
EXTRAS = (None, None, None, {}, {"note": 'ä"x'}, {"file": "a/b.safetensors", "m": 1e-5})


def _tensor(kind: int) -> torch.Tensor:
    t = torch.randn(random.choice([(0,), (1,), (3, 5), (64, 64), (), (2, 1, 7)]))
    if kind == 0 and t.numel():
        t.view(-1)[0] = random.choice([float("nan"), float("inf"), -float("inf")])
    made = {
        1: lambda: t.double() * 10.0 ** random.randint(-300, 300),
        2: lambda: torch.randint(-(2**62), 2**62, (5,)),
        3: lambda: t * 1e-30,
        4: lambda: t.bfloat16(),
        5: lambda: torch.ones(4) * random.randint(1, 3),
        6: lambda: t * 10.0 ** random.randint(-40, 38),
        7: lambda: torch.randint(0, 2, (5,)).bool(),
        8: lambda: torch.view_as_complex(torch.randn(3, 2)),
        9: lambda: -torch.zeros(3),
    }
    return made.get(kind, lambda: t)()


def _lines(names: tuple[str, ...], native: bool | None, seed: int, batches: int) -> bytes:
    random.seed(seed)
    torch.manual_seed(seed)
    pool, out = RowPool(), []
    lines = Lines(names, seed % 2, pool, native=native)
    seq = 0
    for _ in range(batches):
        rows, events = pool.take(torch.device("cpu")), []
        for _ in range(50):
            kind = random.randrange(13)
            step = random.choice([None, 3, 2**70, -1])
            at = (seq, head_of("l.ä", 'C"'), random.randint(0, 9), step)
            at += (random.choice(["in", "out"]), random.choice(PATHS))
            extra = random.choice(EXTRAS)
            t = _tensor(kind)
            if kind == 10 and seq:
                events.append((*at, None, None, None, 0, random.randrange(seq), extra, None))
            elif kind == 11:
                events.append((*at, t.shape, t.dtype, None, 0, None, extra, None))
            else:
                rows.write(t, rows.used)
                events.append((*at, t.shape, t.dtype, rows, rows.used, None, extra, None))
                rows.used += 1
            seq += 1
        for one in lines.of(events, [rows]):
            out.append(one if isinstance(one, bytes) else one.encode() + b"\n")
    return b"".join(out)


@pytest.mark.parametrize("names", [ALL, ("mean",), ("sketch",), ("samples", "l2"), ()])
def test_lines_of_any_tensors(names: tuple[str, ...]) -> None:
    for seed in range(4):
        made = _lines(names, None, seed, 5)
        assert made == _lines(names, False, seed, 5)
        assert made.count(b'"same":') > 10


def test_as_many_earlier_tensors_are_remembered() -> None:
    """4096 are: of 5000 that come twice, some are found again and some are forgotten."""
    found = []
    for native in (None, False):
        pool, out = RowPool(), []
        lines = Lines(("mean",), 0, pool, native=native)
        values = [*range(5000), *range(4000, 5000), *range(3000)]
        for start in range(0, len(values), 250):
            rows, events = pool.take(torch.device("cpu")), []
            for seq in range(start, start + 250):
                rows.write(torch.tensor([float(values[seq])]), rows.used)
                place = (seq, head_of("a", "A"), 0, None, "out", "out")
                size = torch.Size([1])
                events.append((*place, size, torch.float32, rows, rows.used, None, None, None))
                rows.used += 1
            made = lines.of(events, [rows])
            out += [one if isinstance(one, bytes) else one.encode() + b"\n" for one in made]
        found.append(b"".join(out))
    assert found[0] == found[1]
    assert found[0].count(b'"same":') == 1000


def test_an_event_without_a_line_takes_no_earlier_one_with_it(tmp_path) -> None:
    pytest.importorskip("safetensors")
    pool = RowPool()
    lines = Lines(("mean",), 0, pool)
    head = head_of("a", "A")
    good = (
        0,
        head,
        0,
        None,
        "out",
        "out",
        torch.Size([]),
        torch.float32,
        None,
        0,
        None,
        None,
        None,
    )
    folder = TensorFolder(tmp_path / "run.jsonl")
    bad = (*good[:12], folder.save(torch.ones(2), 1, lambda: False))
    folder.path.rmdir()  # the disk takes no file
    made = lines.of([good, bad, good], [])
    assert b"".join([next(made)]).count(b"\n") == 1
    with pytest.raises(OSError, match=r"1\.partial"):
        next(made)


def test_events_that_are_none_are_refused() -> None:
    built = native_module()
    lines = built.TraceLines([("mean", PLACES["mean"])], False, False, "", frozenset(), str, str)
    ok = (0, "h", 0, None, "in", "p", torch.Size([1]), torch.float32, None, 0, None, None, None)
    assert lines.of([ok], []).endswith(b'"shape":[1],"dtype":"float32"}\n')
    for wrong in ([1], [ok[:5]], [(*ok[:8], object(), *ok[9:])], [("x", *ok[1:])]):
        with pytest.raises((TypeError, ValueError)):
            lines.of(wrong, [])
    rows = object()
    with pytest.raises(ValueError, match="slot"):  # no row outside its block is read
        lines.of([(*ok[:8], rows, 5, *ok[10:])], [(rows, 0, 5)])
    with pytest.raises(ValueError, match="fields"):
        built.TraceLines([("mean", PLACES["samples"])], False, False, "", frozenset(), str, str)
    assert lines.of([ok], [])  # and it goes on


class _Odd(nn.Module):
    """Passes on tensors of every kind that native code takes, and that it leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        self.inner(x)
        self.inner(x.t())
        self.inner(x.to_sparse())
        self.inner(torch.empty(3, device="meta"))
        self.inner(torch.view_as_complex(x.reshape(-1, 2)).conj())
        self.inner(torch._neg_view(x))
        self.inner(nn.Parameter(x.detach().clone()))
        self.inner(x.to(torch.float8_e4m3fn))
        y = x.clone()
        self.inner(y)
        y.add_(1)  # in place: another tensor now
        self.inner(y)
        return {"long": torch.arange(300), "many": (x, y, x.double()), "none": torch.ones(0, 4)}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_model_with_tensors_of_all_kinds(tmp_path, context) -> None:
    model, x = _Odd(), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    texts = []
    for native in (True, False):
        path = tmp_path / f"{native}.jsonl"
        with trace(model, path, stats=ALL) as run, context():
            if not native:
                run.recorder._quickly = None
                run.recorder._lines = Lines(ALL, 0, run.recorder._pool, native=False)
            for _ in range(70):  # more tensors than one buffer has rows
                model(x.clone())
        texts.append(path.read_text(encoding="utf-8").split("\n", 1)[1])
    assert texts[0] == texts[1]
    assert len(read(path).records) == 70 * 26 == texts[0].count("\n") - 1


def test_a_sink_takes_bytes_of_several_lines(tmp_path) -> None:
    for background in (True, False):
        path = tmp_path / f"{background}.jsonl"
        with JsonlSink(path, background=background) as sink:
            sink.extend(iter([b'{"a":1}\n{"a":2}\n', '{"a":3}', {"a": 4}]), 4)
        assert path.read_text() == '{"a":1}\n{"a":2}\n{"a":3}\n{"a":4}\n'
