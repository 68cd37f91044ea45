"""A cache of keys that grows: one choice and one kernel for all lengths of a class."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import Causal, Chunked, Dense, Dilated, FirstKeys, Padding, Window, record_selections
from polyattn.errors import InvalidProblem
from polyattn.masks import And, Full, Mask
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.masks.simplify import simplify
from polyattn.selection import scopes
from polyattn.torch import attention, dropin, explain, long_way, short_way
from polyattn.torch.cache import table
from polyattn.torch.size_classes import size_class, span_of
from polyattn.tuning.lookup import problem_class

WAYS = [way for way in (short_way.in_python, short_way.native) if way is not None]


@pytest.fixture(params=WAYS, ids=["python", "native"][: len(WAYS)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("attention", "sdpa"):
        monkeypatch.setattr(short_way, name, getattr(request.param, name))
    attention(*step(4), layout="BNTH")  # plugins are looked for, which ends an epoch
    scopes.invalidate()
    yield request.param
    scopes.invalidate()


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were admitted and planned, which each length of a class shares."""
    found: list[Any] = []
    prepare = long_way.prepare

    def counted(problem: Any, wishes: Any) -> Any:
        found.append(problem)
        return prepare(problem, wishes)

    monkeypatch.setattr(long_way, "prepare", counted)
    return found


def step(length: int, *, layout: str = "BNTH", heads: int = 2, queries: int = 1) -> list[Tensor]:
    shapes = ((1, 4, queries, 16), (1, heads, length, 16), (1, heads, length, 16))
    made = [torch.randn(shape) for shape in shapes]
    return [x.transpose(1, 2) for x in made] if layout == "BTNH" else made


def dense(length: int) -> Tensor:
    return torch.arange(length).ge(3).expand(1, 1, 1, length)


CALLS: dict[str, Callable[[int], Any]] = {
    "plain": lambda s: attention(*step(s), layout="BNTH"),
    "BTNH": lambda s: attention(*step(s, layout="BTNH")),
    "scale": lambda s: attention(*step(s), layout="BNTH", scale=0.3),
    "causal": lambda s: attention(*step(s, queries=3), layout="BNTH", mask=Causal()),
    "dense": lambda s: attention(*step(s), layout="BNTH", mask=Dense(dense(s))),
    "joined": lambda s: attention(*step(s), layout="BNTH", mask=Causal() & Dense(dense(s))),
    "padding": lambda s: attention(*step(s), layout="BNTH", mask=Padding(kv_lengths=[s - 5])),
    "bias": lambda s: attention(*step(s), layout="BNTH", bias=DenseBias(torch.randn(1, 4, 1, s))),
    "alibi": lambda s: attention(*step(s), layout="BNTH", bias=Alibi(torch.rand(4))),
    "native": lambda s: attention(*step(s), layout="BNTH", backend="native_cpu"),
    "sdpa": lambda s: dropin.scaled_dot_product_attention(*step(s, heads=4)),
    "sdpa, mask": lambda s: dropin.scaled_dot_product_attention(*step(s, heads=4), dense(s)),
    "sdpa, grouped": lambda s: dropin.scaled_dot_product_attention(*step(s), enable_gqa=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_length_of_a_known_class_is_not_chosen_for_again(
    name: str, way: Any, long_ways: list[Any]
) -> None:
    call = CALLS[name]
    call(300)
    assert len(long_ways) == 1
    count = table.count
    for length in (*range(257, 290), 511, 512, 300):
        call(length)
    assert len(long_ways) == 1
    assert table.count == count
    call(513)
    assert len(long_ways) == 2


@pytest.mark.parametrize("name", CALLS)
def test_a_class_gives_what_a_call_by_itself_gives(name: str, way: Any) -> None:
    for length in (300, 257, 400):
        torch.manual_seed(length)
        got = CALLS[name](length)
        scopes.invalidate()
        torch.manual_seed(length)
        assert torch.equal(got, CALLS[name](length))
        CALLS[name](300)


def test_lengths_that_training_has_are_of_a_class_too(way: Any, long_ways: list[Any]) -> None:
    for length in (40, 41, 64):
        q, k, v = (x.requires_grad_() for x in step(length, queries=length, heads=4))
        out = attention(q, k, v, layout="BNTH", mask=Causal())
        out.sum().backward()
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.detach().requires_grad_() for x in (q, k, v)), is_causal=True
        )
        assert torch.allclose(out, want, atol=1e-5)
        assert q.grad is not None
    assert len(long_ways) == 1
    with torch.no_grad():
        attention(*step(42, queries=42, heads=4), layout="BNTH", mask=Causal())
    assert len(long_ways) == 2


def test_a_window_is_chosen_for_on_both_sides_of_its_length(way: Any, long_ways: list[Any]) -> None:
    """Below, it masks nothing and is no mask; the kernel of one side is wrong on the other."""
    mask = Causal() & Window(left=299)
    for length in (290, 291, 300, 301, 302, 500, 280, 400):
        q, k, v = step(length, heads=4)
        got = attention(q, k, v, layout="BNTH", mask=mask)
        want = attention(q, k, v, layout="BNTH", mask=mask, backend="reference")
        assert torch.allclose(got, want, atol=1e-5)
    assert len([p for p in long_ways if p.softcap is None]) <= 2 + 2  # ours, the reference's


WRONG: dict[str, Callable[[], Any]] = {
    "keys and values of two lengths": lambda: attention(
        *step(280)[:2], step(281)[2], layout="BNTH"
    ),
    "another batch": lambda: attention(
        step(280)[0], *(x.expand(2, -1, -1, -1) for x in step(280)[1:]), layout="BNTH"
    ),
    "a mask of another length": lambda: attention(
        *step(280), layout="BNTH", mask=Dense(dense(300))
    ),
    "a bias of another length": lambda: attention(
        *step(280), layout="BNTH", bias=DenseBias(torch.randn(1, 4, 1, 300))
    ),
    "a length beyond the keys": lambda: attention(
        *step(280), layout="BNTH", mask=Padding(kv_lengths=[295])
    ),
    "slopes of another batch": lambda: attention(
        *(x.expand(4, -1, -1, -1) for x in step(280)), layout="BNTH", bias=Alibi(torch.rand(3, 4))
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_call_is_refused_though_its_class_is_known(name: str, way: Any) -> None:
    for call in ("plain", "dense", "bias", "padding", "alibi"):
        CALLS[call](300)
    three = [x.expand(3, -1, -1, -1) for x in step(300)]
    attention(*three, layout="BNTH", bias=Alibi(torch.rand(3, 4)))
    with pytest.raises(InvalidProblem):
        WRONG[name]()


@pytest.mark.parametrize("name", CALLS)
def test_recorders_are_told_the_sizes_of_each_call(
    name: str, way: Any, long_ways: list[Any]
) -> None:
    """What they hear of a call that its class has served is what they would hear of it alone."""
    call = CALLS[name]
    with record_selections() as ran:
        for length in (300, 270, 271, 300):
            call(length)
    assert len(long_ways) == 1
    alone = []
    for length in (300, 270, 271, 300):
        scopes.invalidate()
        with record_selections() as by_itself:
            call(length)
        alone += by_itself
    assert ran == alone
    assert [one.problem.kv_len for one in ran if one.problem is not None] == [300, 270, 271, 300]


def test_other_dtypes_and_strides_are_not_of_the_class(way: Any, long_ways: list[Any]) -> None:
    CALLS["plain"](300)
    q, k, v = step(280)
    attention(q.double(), k.double(), v.double(), layout="BNTH")
    assert len(long_ways) == 2
    strided = k.transpose(2, 3).contiguous().transpose(2, 3)
    got = attention(q, strided, v, layout="BNTH")
    assert len(long_ways) == 3
    assert torch.allclose(got, attention(q, k, v, layout="BNTH"), atol=1e-6)


def test_a_request_that_another_backend_meets_is_met_for_each_length(way: Any) -> None:
    """The first of two may refuse one length and take the next."""
    asked = ["flex", "native_cpu"]
    for length in (24, 25, 32):
        q, k, v = step(length)
        with record_selections() as ran:
            attention(q, k, v, layout="BNTH", backend=asked)
        assert ran[0].backend == explain(q, k, v, layout="BNTH", backend=asked).backend


def test_both_forms_of_the_short_way_have_the_same_classes(monkeypatch: Any) -> None:
    if short_way.native is None:
        pytest.skip("the extension is not built")
    draw = random.Random(0)
    sizes = (1, 2, 3, 16, 17, 18, 32, 33, 64, 65)
    reached: list[bool] = []
    for _ in range(300):
        scopes.invalidate()
        b, t, s = (draw.choice(sizes) for _ in range(3))
        attention(torch.randn(b, 2, t, 8), *torch.randn(2, b, 2, s, 8), layout="BNTH")
        b, t, s = (draw.choice((x, x, draw.choice(sizes))) for x in (b, t, s))
        other = torch.randn(b, 2, t, 8), *torch.randn(2, b, 2, s, 8)
        options = (None, None, None, None, None, 0.0, "BNTH", False, None, None)
        found = [way.attention(*other, *options) is not short_way.MISSED for way in WAYS]
        assert found[0] == found[1], (b, t, s)
        reached.append(found[0])
    assert 30 < sum(reached) < 270


MASKS: list[Mask | None] = [
    None, Causal(), Causal("top_left"), Window(left=40), Window(right=50),
    Window(left=30, right=70),
    Causal() & Window(left=45), Causal("top_left") & Window(left=33), Causal() | Window(left=60),
    Full(), And((Causal(), Window(left=0), Window(right=90))),
    Chunked(40), Chunked(60) & Causal(), Causal("top_left") & Chunked(40), ~Chunked(70), Dilated(3),
    Causal() & (Window(left=45) | FirstKeys(60)), ~FirstKeys(33) & Window(left=50),
]  # fmt: skip


def test_a_span_is_where_the_mask_stays_what_it_is() -> None:
    """The definition, tried out: within a class and a span, the laws of masks give the same."""
    draw = random.Random(1)
    seen = 0
    for _ in range(1500):
        mask = draw.choice(MASKS)
        t, s = draw.choice((1, 2, draw.randint(1, 130))), draw.randint(17, 130)
        t = s if draw.random() < 0.3 else t
        span = span_of(mask, t, s)
        if span is None:
            continue
        assert span.low <= s <= span.high
        shape = (1, 2, t, 8), (1, 2, s, 8), (1, 2, s, 8)
        kind = size_class("BNTH", *shape)
        for _ in range(20):
            t2, s2 = draw.randint(1, 130), draw.randint(span.low, span.high)
            t2 = draw.choice((t, t2, s2))
            if size_class("BNTH", (1, 2, t2, 8), (1, 2, s2, 8), (1, 2, s2, 8)) == kind:
                one, other = map(str, (simplify(mask, t, s), simplify(mask, t2, s2)))
                assert one == other, (mask, t, s, t2, s2)
                seen += 1
    assert seen > 3000


def test_measured_times_see_no_more_of_sizes_than_classes() -> None:
    draw = random.Random(2)
    for _ in range(300):
        b, t, s = draw.randint(1, 9), draw.randint(1, 90), draw.randint(17, 90)
        b2, t2, s2 = draw.randint(1, 9), draw.randint(1, 90), draw.randint(17, 90)
        shapes = [
            ((x, 2, y, 8), (x, 2, z, 8), (x, 2, z, 8)) for x, y, z in ((b, t, s), (b2, t2, s2))
        ]
        one, other = (explain(*(torch.empty(x) for x in shape), layout="BNTH") for shape in shapes)
        if size_class("BNTH", *shapes[0]) == size_class("BNTH", *shapes[1]):
            assert one.problem is not None and other.problem is not None
            assert problem_class(one.problem) == problem_class(other.problem)
            assert one.backend == other.backend
