"""What the native kernels may touch: the memory of each array, whatever the call says of its sizes.

The operators take tensors as they come, as a compiled program or a faulty front-end would hand them
over; the extension itself must see that an array is too small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polyattn import BlockMap, Causal, Dense, LeftPadding, Padding, PrefixLM, Segments
from polyattn.errors import InvalidProblem
from polyattn.masks.biases import DenseBias
from polyattn.native import module
from polyattn.native.program import BLOCKS, DENSE, KV_LIMIT, PACKED, Q_LIMIT, SEGMENTS
from polyattn.selection.registry import Available
from polyattn.torch import attention

if not isinstance(module.status(), Available):
    pytest.skip("the extension is not built", allow_module_level=True)

from polyattn.backends.native_cpu.torch.arguments import memory
from polyattn.backends.native_cpu.torch.operator import native_attention, native_attention_backward

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
BEYOND = "which are all that its memory holds"


def qkv(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    q, k, v = (torch.randn(shape, generator=generator, **options) for shape in shapes)
    return q, k, v


def run(
    *,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    codes: tuple[int, ...] = (),
    arrays: tuple[Tensor, ...] = (),
    layout: str = "BTNH",
) -> Tensor:
    """Call the operator with what is given, checked by nobody before."""
    q, k, v = qkv()
    if layout == "packed":
        q, k, v = (x[0] for x in (q, k, v))
    out, _ = native_attention(
        q, k, v, bias, slopes, sinks, list(codes), list(arrays), layout, 1.0, 0.0, True
    )
    return out


def ids(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def bits(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.uint8)


whole: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.zeros(N)},
    "slopes": {"slopes": torch.zeros(N)},
    "bias": {"bias": torch.zeros(1, N, T, S)},
    "lengths": {"codes": (KV_LIMIT, 0, 0, 0), "arrays": (ids(B),)},
    "query lengths": {"codes": (Q_LIMIT, 0, 0, 0), "arrays": (ids(B),)},
    "query ids": {"codes": (SEGMENTS, 0, 1, 0), "arrays": (ids(T), ids(S))},
    "key ids": {"codes": (SEGMENTS, 0, 1, 0), "arrays": (ids(T), ids(S))},
    "blocks": {"codes": (BLOCKS, 0, 2, 2), "arrays": (bits(1, 1, 3, 4),)},
    "dense": {"codes": (DENSE, 0, 0, 0), "arrays": (bits(B, N, T, S),)},
}
short: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.zeros(1)},
    "slopes": {"slopes": torch.zeros(N - 1)},
    "bias": {"bias": torch.zeros(1, N, T - 1, S)},
    "lengths": {"arrays": (ids(B - 1),)},
    "query lengths": {"arrays": (ids(B - 1),)},
    "query ids": {"arrays": (ids(T - 1), ids(S))},
    "key ids": {"arrays": (ids(T), ids(S - 1))},
    "blocks": {"arrays": (bits(1, 1, 3, 3),)},
    "dense": {"arrays": (bits(B, N, T, S - 1),)},
}


@pytest.mark.parametrize("what", whole)
def test_an_array_that_is_too_small_is_refused(what: str) -> None:
    run(**whole[what])
    with pytest.raises(InvalidProblem, match=BEYOND):
        run(**whole[what] | short[what])


def test_packed_offsets_that_are_too_few_are_refused() -> None:
    q, k, _ = qkv()
    cuts = [torch.tensor([0, x.shape[1]]) for x in (q, k)]
    run(codes=(PACKED, 0, 1, 0), arrays=tuple(cuts), layout="packed")
    few = torch.tensor([0, 1, S])[:2].clone()  # the sequences are counted by the other one
    with pytest.raises(InvalidProblem, match="last packed offset"):
        run(codes=(PACKED, 0, 1, 0), arrays=(cuts[0], few), layout="packed")
    more = torch.tensor([0, 1, T])
    with pytest.raises(InvalidProblem, match=f"packed offsets.*{BEYOND}"):
        run(codes=(PACKED, 0, 1, 0), arrays=(more, cuts[1]), layout="packed")


def test_a_view_may_reach_as_far_as_its_storage() -> None:
    """The rows of a larger array count by their strides, up to the storage's end."""
    stored = torch.zeros(N * T * S + 11)
    biases = (stored[start : start + N * T * S].view(1, N, T, S) for start in (0, 11))
    wanted = run()
    assert all(torch.allclose(run(bias=bias), wanted) for bias in biases)


def test_keys_of_another_length_than_the_values() -> None:
    """The sizes of a call are read from the keys: fewer values than these are not read past."""
    q, k, v = qkv()
    with pytest.raises(InvalidProblem, match=f"v: .*{BEYOND}"):
        native_attention(q, k, v[:, :3].clone(), None, None, None, [], [], "BTNH", 1.0, 0.0, False)


def test_a_backward_pass_with_arrays_that_are_too_small() -> None:
    q, k, v = qkv()
    out, lse = native_attention(q, k, v, None, None, None, [], [], "BTNH", 1.0, 0.0, True)

    def backward(lse: Tensor) -> Any:
        return native_attention_backward(
            torch.ones_like(out), None, q, k, v, out, lse, None, None, None, [], [], "BTNH", 1.0,
            0.0, False, False,
        )  # fmt: skip

    backward(lse)
    with pytest.raises(InvalidProblem, match=f"lse: .*{BEYOND}"):
        backward(lse[:1].clone())


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["plain", "lse"])
def test_a_storage_that_was_emptied_is_refused(options: dict[str, Any]) -> None:
    """As sharded training does between uses: the tensor keeps its sizes, the memory is gone."""
    q, k, v = qkv()
    attention(q, k, v, backend="native_cpu", **options)
    k.untyped_storage().resize_(0)
    with pytest.raises(InvalidProblem, match="k has elements but no data pointer"):
        attention(q, k, v, backend="native_cpu", **options)


def test_the_extension_compares_the_tensors_of_a_call() -> None:
    """The way without pointers: the tensors say the sizes, and have to say the same ones."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        pytest.skip("this torch cannot be read without Python calls")
    q, k, v = qkv()
    out, native = torch.empty_like(q), module.load()

    def call(*tensors: Tensor, rows_first: bool = True) -> None:
        native.forward_tensors(exchange, 0, 1, 0, rows_first, 1.0, 0.0, *tensors, (), *(None,) * 4)

    call(q, k, v, out)
    assert torch.equal(out, run())
    for wrong in (k[:1], k[:, 1:], k[:, :, :1], k[..., 1:]):
        with pytest.raises(ValueError, match="entries in dim"):
            call(q, wrong, v, out)
    for wrong in (v[:1], v[:, 1:], v[:, :, :1], v[..., 1:]):
        with pytest.raises(ValueError, match="entries in dim"):
            call(q, k, wrong, out)
    with pytest.raises(ValueError, match="entries in dim"):
        call(q, k, v, out[:, 1:])
    with pytest.raises(ValueError, match="heads"):
        call(q, k, v, out, rows_first=False)
    for spoilt in (v.double(), v.half(), v[0]):
        with pytest.raises(ValueError, match="v: expected a tensor of 4 dims"):
            call(q, k, spoilt, out)
    with pytest.raises(ValueError, match="contiguous last dim"):
        call(q, k.transpose(1, 3).contiguous().transpose(1, 3), v, out)
    with pytest.raises(ValueError, match="out's rows overlap"):
        call(q, k, v, out[:1].expand(out.shape))
    for alien in (None, 3, v.to("meta")):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            call(q, alien, v, out)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        native.forward_tensors(None, 0, 1, 0, True, 1.0, 0.0, q, k, v, out, (), *(None,) * 4)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": Causal()},
    "lse": {"return_lse": True},
    "BNTH": {"layout": "BNTH"},
}


every_call = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
in_training = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])


def in_layout(options: dict[str, Any]) -> list[Tensor]:
    turned = options.get("layout") == "BNTH"
    return [x.transpose(1, 2).contiguous() if turned else x for x in qkv()]


def first(result: Any) -> Tensor:
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


@every_call
@in_training
def test_zeros_that_no_memory_holds(options: dict[str, Any], grad: bool) -> None:
    for place in range(3):
        given, plain = in_layout(options), in_layout(options)
        given[place] = torch._efficientzerotensor(given[place].shape)
        plain[place] = torch.zeros(plain[place].shape)
        given[0 if place else 1].requires_grad_(grad)
        wanted = attention(*plain, backend="native_cpu", **options)
        for _ in range(2):  # prepared, and from the table
            found = attention(*given, backend="native_cpu", **options)
            assert torch.equal(first(found), first(wanted))


@every_call
@in_training
def test_copies_on_write_stay_uncopied(options: dict[str, Any], grad: bool) -> None:
    originals = in_layout(options)
    wanted = attention(*originals, backend="native_cpu", **options)
    for _ in range(2):
        lazy = [torch._lazy_clone(x).requires_grad_(grad) for x in originals]
        bias = torch._lazy_clone(torch.zeros(1, 1, T, S))
        found = attention(*lazy, backend="native_cpu", **options)
        assert torch.equal(first(found), first(wanted))
        if grad:
            first(found).sum().backward()
        attention(*lazy, backend="native_cpu", bias=DenseBias(bias), **options)
        assert all(map(torch._C._is_cow_tensor, (*lazy, bias)))


class _Standing(Tensor):
    """A tensor that has no memory and stands for one that has, as asynchronous collectives do."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, offset: int) -> _Standing:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), offset, dtype=held.dtype
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(_Standing, lambda x: x.held, (args, kwargs or {}))
        return func(*args, **kwargs)


_MASKS = {
    "padding": lambda held: Padding(kv_lengths=held(torch.tensor([3, 5]))),
    "left padding": lambda held: LeftPadding(held(torch.tensor([2, 4]))),
    "prefix": lambda held: PrefixLM(held(torch.tensor([2, 4]))),
    "segments": lambda held: Segments(
        ids(B * T).view(B, T), held(torch.arange(B * S).view(B, S) // 4)
    ),
    "dense": lambda held: Dense(held(torch.arange(S) % 3 > 0)),
    "blocks": lambda held: BlockMap(
        5, 3, held(torch.tensor([[[[2, 0]]]])), held(torch.tensor([[[1]]]))
    ),
}


@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", _MASKS)
def test_masks_of_tensors_that_stand_for_others(kind: str, grad: bool, offset: int) -> None:
    q, k, v = qkv(requires_grad=grad)
    want = attention(q, k, v, mask=_MASKS[kind](lambda x: x), backend="native_cpu")
    mask = _MASKS[kind](lambda x: _Standing(x, offset))
    got = attention(q, k, v, mask=mask, backend="native_cpu")
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    if grad:
        torch.testing.assert_close(
            *(torch.autograd.grad(x.square().sum(), q)[0] for x in (got, want))
        )


def test_views_into_a_storage_without_memory_have_no_address() -> None:
    assert memory(_Standing(torch.ones(2), 16)) == (0, 8)


def test_the_errors_say_what_was_got_and_expected() -> None:
    raises: Callable[..., Any] = pytest.raises
    with raises(InvalidProblem, match=r"sinks: got .* elements 0 to 3, expected elements 0 to 0"):
        run(sinks=torch.zeros(1))
