"""The short way in the native module does what the one in Python does."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyattn import Causal, Dense, PolyattnError, Window, record_selections, use_backend
from polyattn.masks.biases import DenseBias
from polyattn.selection import scopes
from polyattn.torch import attention, paged_attention, quantized_attention, short_way
from polyattn.torch import scaled_dot_product_attention as sdpa
from polyattn.torch.cache import Row, table
from tests.torch.random_calls import draw

pytestmark = pytest.mark.skipif(short_way.native is None, reason="the extension is not built")

DEFAULTS = {
    "mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None, "dropout_p": 0.0,
    "layout": "BTNH", "return_lse": False, "deterministic": None, "backend": None,
}  # fmt: skip


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or bool(a == b)


def both(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Go both short ways; return what they give, which is the same."""
    arguments = q, k, v, *{**DEFAULTS, **options}.values()
    mine = outcome(short_way.in_python.attention, *arguments)
    theirs = outcome(short_way.native.attention, *arguments)
    assert same(mine, theirs), (mine, theirs)
    return theirs


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND = {
    "nothing": nullcontext, "scope": lambda: use_backend("sdpa_math"),
    "never": lambda: use_backend(never="sdpa_flash"), "recorder": record_selections,
    "switches": lambda: sdpa_kernel(SDPBackend.MATH), "determined": deterministic,
    "no grad": torch.no_grad, "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_calls_of_any_kind(around: str) -> None:
    found = 0
    rng = random.Random(7)
    torch.manual_seed(7)
    for call in (draw(rng) for _ in range(60)):
        with AROUND[around]():
            for _ in range(2):
                try:
                    attention(call.q, call.k, call.v, **call.options)
                except PolyattnError:
                    break
            if call.options.get("dropout_p"):
                continue
            found += both(call.q, call.k, call.v, **call.options) is not short_way.MISSED
    assert (found == 0) == (around == "autocast")


def test_calls_that_are_recorded_go_the_short_way_too() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    other = torch.randn(1, 6, 2, 8)
    for x in (q, other, q):
        attention(x, k, v)
        sdpa(*(one.transpose(1, 2) for one in (x, k, v)))
        attention(x, k, v, mask=Causal())
    with record_selections() as outer, record_selections() as inner:
        for way in (short_way.in_python, short_way.native):
            for x in (q, other):  # the newest entry, and one that is found by its shapes
                for mask in (None, Causal()):
                    options = {**DEFAULTS, "mask": mask}
                    assert way.attention(x, k, v, *options.values()) is not short_way.MISSED
                turned = (one.transpose(1, 2) for one in (x, k, v))
                assert way.sdpa(*turned, None, 0.0, False, None, False) is not short_way.MISSED
    assert len(inner) == 12 and inner[:6] == inner[6:]
    assert list(outer) == list(inner)
    assert [one.problem.q_len for one in inner[:6]] == [4, 4, 4, 6, 6, 6]
    assert [one.problem.mask is None for one in inner[:3]] == [True, False, True]


def test_a_scope_a_switch_and_the_environment_change_the_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    for _ in range(3):
        attention(q, k, v)
    assert both(q, k, v) is not short_way.MISSED
    with use_backend("sdpa_math"):
        assert both(q, k, v) is short_way.MISSED
    with sdpa_kernel(SDPBackend.MATH):
        assert both(q, k, v) is short_way.MISSED
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa_math")
    assert both(q, k, v) is short_way.MISSED
    monkeypatch.undo()
    assert both(q, k, v) is not short_way.MISSED
    scopes.invalidate()
    assert both(q, k, v) is short_way.MISSED


def test_what_ran_lately_is_tried_first_and_gives_what_the_row_does() -> None:
    """More sizes than are kept for a key: some seen before, some of their classes."""
    torch.manual_seed(2)
    rng = random.Random(2)
    query = torch.randn(2, 1, 2, 8)
    whole = torch.randn(2, 70, 2, 8)
    dense = torch.rand(2, 1, 1, 70) > 0.3
    kinds: list[Any] = [lambda n: {}, lambda n: {"mask": Dense(dense[..., :n])}]
    for options in kinds:
        for keys in (9, 20, 33, 41, 48, 66):
            attention(query, whole[:, :keys], whole[:, :keys], **options(keys))
    found = 0
    with record_selections() as made:
        for _ in range(150):
            keys, options = rng.randint(9, 70), rng.choice(kinds)
            before = len(made)
            given = query, whole[:, :keys], whole[:, :keys]
            if both(*given, **options(keys)) is short_way.MISSED:
                continue
            found += 1
            mine, theirs = made[before:]
            assert mine == theirs and theirs.problem.kv_len == keys
    assert found > 100


def test_what_ran_lately_is_forgotten_when_a_choice_changes() -> None:
    q, k, v = (torch.randn(1, n, 2, 8) for n in (1, 20, 20))
    for _ in range(2):
        attention(q, k, v)
        attention(q, k[:, :19], v[:, :19])
    assert both(q, k[:, :18], v[:, :18]) is not short_way.MISSED
    scopes.invalidate()
    for keys in (18, 19, 20):
        assert both(q, k[:, :keys], v[:, :keys]) is short_way.MISSED


def test_no_routed_call_is_missed_by_a_function_mode() -> None:
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f)
            return f(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 4, 8)
    arguments = q, q, q, None, 0.0, True, None, False
    expected = sdpa(q, q, q, is_causal=True)
    for way in (short_way.in_python, short_way.native):
        assert same(way.drop_in(*arguments), expected)
        with Mode():
            assert way.drop_in(*arguments) is short_way.MISSED
            assert same(way.sdpa(*arguments), expected)
    with Mode():
        assert torch.equal(sdpa(q, q, q, is_causal=True), expected)
    assert sdpa in seen
    seen.clear()
    with Mode(), torch._C.DisableTorchFunction():
        assert torch.equal(sdpa(q, q, q, is_causal=True), expected)
    assert sdpa not in seen


def test_who_listens_is_given_the_selection_of_the_class() -> None:
    class Deaf(list[Any]):
        pass

    query, whole = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 70, 8)
    mask = torch.rand(2, 1, 1, 70) > 0.3
    for keys in (9, 40, 70):
        sdpa(query, whole[:, :, :keys], whole[:, :, :keys])
        sdpa(query, whole[:, :, :keys], whole[:, :, :keys], mask[..., :keys])
    for keys in (9, 40, 50, 70, 3):
        for allowed in (None, mask[..., :keys]):
            given = query, whole[:, :, :keys], whole[:, :, :keys], allowed
            arguments = *given, 0.0, False, None, False
            mine = short_way.in_python.heard(*arguments, Deaf)
            theirs = short_way.native.heard(*arguments, Deaf)
            assert (mine is short_way.MISSED) == (theirs is short_way.MISSED) == (keys == 3)
            if keys == 3:
                continue
            assert mine[0] is theirs[0] and torch.equal(mine[1], theirs[1])
            assert torch.equal(mine[1], sdpa(*given))
            with record_selections() as ran:
                for way in (short_way.in_python, short_way.native):
                    assert way.heard(*arguments, Deaf) is short_way.MISSED
                sdpa(*given)
            assert [one.of_class or one for one in ran] == [theirs[0]]


def test_what_is_no_call_is_left_alone() -> None:
    q = torch.randn(1, 4, 2, 8)
    nested = torch.nested.nested_tensor([torch.randn(3, 2), torch.randn(4, 2)])
    for _ in range(2):
        attention(q, q, q)
    for x in (nested, None, 3, torch.randn(1, 4, 2, 8).to_sparse()):
        assert both(q, q, x) is short_way.MISSED
    for options in ({"mask": q}, {"mask": []}, {"layout": []}, {"backend": {}}, {"scale": q}):
        assert both(q, q, q, **options) is short_way.MISSED
    with pytest.raises(TypeError, match="got 1 arguments, expected 13"):
        short_way.native.attention(q)


def test_masks_share_an_entry_where_they_are_equal() -> None:
    q, k, v = (torch.randn(1, 8, 2, 8) for _ in range(3))
    for mask in (Causal(), Causal() & Window(left=2), ~Causal() | Window(left=0)):
        for _ in range(3):
            attention(q, k, v, mask=mask)
        assert both(q, k, v, mask=mask) is not short_way.MISSED
    assert both(q, k, v, mask=Causal() & Window(left=2)) is not short_way.MISSED
    assert both(q, k, v, mask=~Causal() | Window(left=0)) is not short_way.MISSED
    assert both(q, k, v, mask=Causal() & Window(left=3)) is short_way.MISSED
    assert both(q, k, v, mask=~(Causal() & Window(left=2))) is short_way.MISSED


def test_errors_of_kernels_reach_the_caller_and_nothing_runs_twice() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    for _ in range(3):
        attention(q, k, v, scale=0.5)
    key = next(key for key in table.rows if key.scale == 0.5)
    row, ran = table.rows[key], []

    def fails(*arguments: Any) -> None:
        ran.append(arguments)
        scopes.invalidate()  # the entry is gone while it runs
        gc.collect()
        raise LookupError("of the kernel")

    for way in (short_way.in_python, short_way.native):
        table.rows[key] = Row(row.check, fails, row.plan, {}, {})
        table.changed()
        with pytest.raises(LookupError, match="of the kernel"):
            way.attention(q, k, v, *{**DEFAULTS, "scale": 0.5}.values())
    assert len(ran) == 2 and ran[0][3:] == ran[1][3:] == (None, None, None)


def test_references_are_given_back() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    mask, scale = Causal(), float("0.25")
    for _ in range(3):
        attention(q, k, v, mask=mask, scale=scale)
    held = [q, k, v, mask, scale, short_way.MISSED]
    run = lambda options: short_way.native.attention(q, k, v, *{**DEFAULTS, **options}.values())  # noqa: E731
    both_kinds = {"mask": mask, "scale": scale}, {"mask": mask, "scale": 0.75}
    for options in both_kinds:
        run(options)
    before = [sys.getrefcount(x) for x in held]
    for options in both_kinds:
        for _ in range(100):
            run(options)
    assert [sys.getrefcount(x) for x in held] == before


def test_the_drop_in_and_pages() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    for _ in range(3):
        sdpa(q, k, v, is_causal=True)
    for causal in (True, False):
        arguments = q, k, v, None, 0.0, causal, None, False
        mine, theirs = short_way.in_python.sdpa(*arguments), short_way.native.sdpa(*arguments)
        assert same(mine, theirs) and (theirs is short_way.MISSED) != causal
    pages, query = torch.randn(8, 16, 2, 32), torch.randn(2, 1, 4, 32)
    where = torch.tensor([[5, 0], [3, 7]]), torch.tensor([20, 3])
    for _ in range(3):
        paged_attention(query, pages, pages, *where)
    for mask in (Causal(), None):
        arguments = query, pages, pages, *where, mask, None, None, None, "BTNH", False, None
        mine, theirs = short_way.in_python.paged(*arguments), short_way.native.paged(*arguments)
        assert same(mine, theirs) and (theirs is short_way.MISSED) == (mask is None)


DEFAULTS_OF_CODES = {
    "mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None, "layout": "BTNH",
    "return_lse": False, "backend": None,
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_quantised_keys(around: str) -> None:
    torch.manual_seed(3)
    here = AROUND[around] if around != "scope" else lambda: use_backend("reference")
    scales, others = torch.rand(2, 2, 2), torch.rand(2, 2, 2).double()
    codes = torch.randint(-9, 9, (2, 20, 2, 16), dtype=torch.int8)
    query, longer = torch.randn(2, 1, 4, 16), torch.randn(2, 3, 4, 16)
    options: list[dict[str, Any]] = [
        {}, {"mask": Causal()}, {"mask": Dense(torch.rand(20) > 0.3)}, {"softcap": 3.0},
        {"scale": 0.5, "return_lse": True}, {"sinks": torch.zeros(4)},
        {"bias": DenseBias(torch.randn(20))}, {"backend": "reference"},
    ]  # fmt: skip
    found = 0
    for option in options:
        for q in (query, longer, query.double(), query.requires_grad_(around == "nothing")):
            for given, size in ((scales, 16), (scales, 10), (others, 16), (None, 16), (scales, [])):
                with here():
                    for _ in range(2):
                        try:
                            quantized_attention(
                                q, codes, codes, given, given, block_size=size, **option
                            )
                        except PolyattnError:
                            break
                    asked = {**DEFAULTS_OF_CODES, **option}
                    arguments = q, codes, codes, given, given, size, *asked.values()
                    mine = outcome(short_way.in_python.quantized, *arguments)
                    theirs = outcome(short_way.native.quantized, *arguments)
                assert same(mine, theirs), (option, mine, theirs)
                found += theirs is not short_way.MISSED
    assert (found == 0) == (around == "autocast"), found


def test_recorders_see_quantised_keys_with_the_sizes_of_each_call() -> None:
    codes, scales = torch.randint(-9, 9, (1, 64, 2, 16), dtype=torch.int8), torch.rand(1, 2, 4)
    for keys in (48, 40, 40):
        last = codes[:, :keys], codes[:, :keys], scales[..., :3], scales[..., :3]
        quantized_attention(torch.randn(1, 1, 2, 16), *last, block_size=16, mask=Window(left=8))
    with record_selections() as ran:
        for way in (short_way.in_python, short_way.native):
            for keys in (40, 33, 48):
                held = codes[:, :keys], codes[:, :keys], scales[..., :3], scales[..., :3]
                options = {**DEFAULTS_OF_CODES, "mask": Window(left=8)}
                asked = torch.randn(1, 1, 2, 16), *held, 16, *options.values()
                assert way.quantized(*asked) is not short_way.MISSED, keys
    assert [one.problem.kv_len for one in ran] == [40, 33, 48] * 2
