"""What torch's own dispatcher asks of a call before it takes one of its attention kernels.

Each check of `sdp_utils_cpp.{h,cpp}` and `cuda/sdp_utils.cpp` (torch 2.9 to 2.15) is told here
once, as reasons with the fact names of :class:`polyattn.capabilities.Capabilities`; all of them
are looked at, where torch stops at the first. Devices, dtypes and compute capabilities are not
told again: they are those that the backend declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from polyattn.selection.capabilities import Reason, arch_number

__all__ = ["CHECKS", "Array", "SdpaCall", "faults"]


# torch 2.13 has its flash kernel for CPUs apply both a mask and the causal flag, 2.15 never; and
# 2.15 gives three dims one more, so that this kernel takes them, and one key head to all queries'
_SINCE_2_15 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


@dataclass(frozen=True)
class Array:
    """What the checks look at in a tensor; `stride` is that of its last dim."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    stride: int = 1
    offset: int = 0  # of its storage, in bytes
    form: str = "dense"  # or "nested", "sparse"

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def size(self, dim: int) -> int | None:
        """Return the size of a dim counted from the end, or None where there is none."""
        return self.shape[dim] if -dim <= self.rank else None


@dataclass(frozen=True, kw_only=True)
class SdpaCall:
    """One call of ``scaled_dot_product_attention``, as its dispatcher sees it.

    `empty`: torch answers it with zeros before any kernel is looked for. `deterministic`: torch is
    told to use deterministic algorithms and to raise where it cannot.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None = None
    mask_grad: bool = False
    dropout: float = 0.0
    is_causal: bool = False
    gqa: bool = False
    grad: bool = False
    arch: str | None = None
    deterministic: bool = False
    empty: bool = False

    def as_dispatched(self) -> SdpaCall:
        """Return the call as torch's own checks see it: 2.15 gives inputs of 3 dims a batch of 1.

        Seen on CPUs only.
        """
        three = all(x.rank == 3 and x.device.startswith("cpu") for _, x in self.inputs)
        if not (_SINCE_2_15 and three):
            return self
        query, key, value = (replace(x, shape=(1, *x.shape)) for _, x in self.inputs)
        mask = self.mask
        if mask is not None and mask.rank < 4:
            mask = replace(mask, shape=(*(1,) * (4 - mask.rank), *mask.shape))
        return replace(self, query=query, key=key, value=value, mask=mask)

    @property
    def inputs(self) -> tuple[tuple[str, Array], ...]:
        """The query, key and value with their names."""
        return ("query", self.query), ("key", self.key), ("value", self.value)

    @property
    def sm(self) -> int:
        """The compute capability as a number; a new one where none is known."""
        return arch_number(self.arch) if self.arch else 80


def _each(call: SdpaCall, what: Callable[[Array], object]) -> str:
    return ", ".join(f"{name} {what(x)}" for name, x in call.inputs)


def _shapes(call: SdpaCall) -> str:
    return _each(call, lambda x: x.shape)


def faults(call: SdpaCall) -> Iterator[Reason]:
    """Yield what is wrong with the call itself: no kernel of torch takes it, or none safely."""
    for fact, values in (
        ("dtype", [x.dtype for _, x in call.inputs]),
        ("device", [x.device for _, x in call.inputs]),
    ):
        if len(set(values)) > 1:
            yield Reason(fact, " and ".join(dict.fromkeys(values)), f"one {fact}", "convert them")
    if any(x.form == "sparse" for _, x in call.inputs) or (call.mask and call.mask.form != "dense"):
        yield Reason("storage", "a sparse tensor or a nested mask", "strided tensors")
    if min(x.rank for _, x in call.inputs) < 2:
        yield Reason("rank", _each(call, lambda x: x.rank), "2 and more dims")
    if _SINCE_2_15:
        yield from _mask_or_causal(call)
    mask = call.mask
    if mask is not None and mask.dtype not in ("bool", "float32", call.query.dtype):
        yield Reason(
            "mask",
            f"an attn_mask of {mask.dtype} beside {call.query.dtype}",
            f"bool, float32 or {call.query.dtype}",
            "cast the mask",
        )
    if mask is not None and mask.device != call.query.device:
        yield Reason("mask", f"an attn_mask on {mask.device}", call.query.device, "move the mask")
    keys, values_ = call.key.size(-2), call.value.size(-2)
    if keys != values_ and not call.empty and call.key.form == call.value.form == "dense":
        # the fused kernels are not kept from it: they read past the end of the values
        yield Reason("value length", f"{values_} for {keys} keys", "as many values as keys")


def _mask_or_causal(call: SdpaCall) -> Iterator[Reason]:
    if call.is_causal and call.mask is not None:
        yield Reason("mask", "an attn_mask beside is_causal=True", "one of them")


def _flash_cpu(call: SdpaCall) -> Iterator[Reason]:
    if call.dropout != 0.0:
        yield Reason("dropout", f"dropout_p={call.dropout}", "0 on a CPU")
    yield from _dense(call)
    yield from _four_dims(call)
    yield from _heads(call, grouped=True)
    yield from _mask_shape(call)
    sizes = [x.size(-1) for _, x in call.inputs]
    if len(set(sizes)) > 1:
        yield Reason(
            "value dim" if sizes[0] == sizes[1] else "head dim", _head_dims(call), "equal ones"
        )
    yield from _lengths(call)
    yield from _strides(call, singleton=False, mask=False)


def _flash_cuda(call: SdpaCall) -> Iterator[Reason]:
    yield from _dense(call)
    yield from _four_dims(call)
    if call.mask is not None:
        yield Reason("mask", "an attn_mask", "is_causal or no mask", "ask sdpa_efficient")
    sizes = [x.size(-1) for _, x in call.inputs]
    if len(set(sizes)) > 1:
        yield Reason(
            "value dim" if sizes[0] == sizes[1] else "head dim", _head_dims(call), "equal ones"
        )
    wide = sizes[0] or 0
    if wide > 256:
        yield Reason("head dim", str(wide), "at most 256")
    small = 86 <= call.sm <= 89 or 120 <= call.sm <= 121
    if call.grad and small and (192 < wide <= 224 or (wide > 224 and call.dropout > 0)):
        yield Reason("head dim", f"{wide} in training on {call.arch}", "at most 192")
    lengths = call.query.size(-2), call.key.size(-2)
    if call.is_causal and lengths[0] != lengths[1]:
        yield Reason("mask", f"is_causal with T={lengths[0]}, S={lengths[1]}", "equal lengths")
    yield from _heads(call, grouped=True)
    yield from _lengths(call)
    yield from _strides(call, singleton=True, mask=True)


def _efficient(call: SdpaCall) -> Iterator[Reason]:
    yield from _dense(call)
    yield from _four_dims(call)
    half = call.query.dtype in ("float16", "bfloat16")
    step = 8 if half and call.sm >= 70 else 4 if call.sm >= 80 else 1
    sizes = [x.size(-1) or 0 for _, x in call.inputs]
    if sizes[0] != sizes[1] or any(size < 1 or size % step for size in sizes):
        yield Reason(
            "head dim",
            _head_dims(call),
            f"multiples of {step}, query and key alike",
            "pad the heads",
        )
    if call.query.dtype == "bfloat16" and call.sm < 80:
        yield Reason("dtype", f"bfloat16 on {call.arch}", "bfloat16 from sm_80")
    width = step * (2 if half else 4)
    if call.sm >= 80 and any(x.offset % width for _, x in call.inputs):
        yield Reason(
            "alignment",
            _each(call, lambda x: f"{x.offset % width} bytes off"),
            f"tensors that begin at multiples of {width} bytes",
            "clone them",
        )
    yield from _lengths(call)
    yield from _strides(call, singleton=False, mask=True)
    yield from _heads(call, grouped=False)
    yield from _mask_broadcasts(call)


def _cudnn(call: SdpaCall) -> Iterator[Reason]:
    yield from _dense(call)
    yield from _four_dims(call)
    if call.deterministic:
        yield Reason(
            "determinism",
            "torch.use_deterministic_algorithms(True)",
            "no promise of bitwise equal results",
        )
    yield from _mask_shape(call)
    if call.dropout * 16 != int(call.dropout * 16):
        yield Reason("dropout", f"dropout_p={call.dropout}", "multiples of 1/16")
    yield from _lengths(call)
    yield from _strides(call, singleton=True, mask=True)
    yield from _heads(call, grouped=True, apart=True)
    sizes = call.query.size(-1) or 0, call.value.size(-1) or 0
    wide = sizes == (192, 128) and call.sm in (90, 100, 101, 103)
    if any(size % 8 for size in sizes) or (max(sizes) > 128 and not wide):
        takes = "multiples of 8 up to 128; (192, 128) on sm_90 and sm_10x"
        yield Reason("head dim", _head_dims(call), takes, "pad the heads")
    if call.key.size(-2) == 1:
        yield Reason("key length", "1", "2 and more")
    if call.query.size(-2) == 1 and call.dropout > 0:
        yield Reason("query length", f"1 with dropout_p={call.dropout}", "2 and more with dropout")
    if call.query.rank == 4 and max(call.query.shape[:2]) > 65535:
        batch, heads = call.query.shape[:2]
        yield Reason("grid", f"batch {batch}, heads {heads}", "at most 65535 of both")


def _math(call: SdpaCall) -> Iterator[Reason]:
    yield from _mask_or_causal(call)
    if call.dropout > 1:
        yield Reason("dropout", f"dropout_p={call.dropout}", "0 to 1")
    if any(x.form == "nested" for _, x in call.inputs):
        return
    if call.query.size(-1) != call.key.size(-1):
        yield Reason("head dim", _head_dims(call), "query and key alike")
    leads = [x.shape[:-2] for _, x in call.inputs]
    if call.gqa:
        leads, told = _repeated(leads)
        if told:
            yield Reason("GQA", _shapes(call), told)
            return
    batch = _broadcast(*leads)
    if batch is None:
        yield Reason(
            "shapes",
            _shapes(call),
            "leading dims that broadcast",
            "" if call.gqa else "enable_gqa=True where heads are shared",
        )
    first = _broadcast(*leads[:2])
    lengths = call.query.size(-2), call.key.size(-2)
    if call.mask is None or first is None or None in lengths:
        return
    scores = (*first, *(n for n in lengths if n is not None))
    if _broadcast(scores, call.mask.shape) != scores:
        yield Reason(
            "mask", f"an attn_mask of shape {call.mask.shape}", f"what broadcasts to {scores}"
        )


CHECKS: dict[tuple[str, str], Callable[[SdpaCall], Iterator[Reason]]] = {
    ("sdpa_flash", "cpu"): _flash_cpu,
    ("sdpa_flash", "cuda"): _flash_cuda,
    ("sdpa_efficient", "cuda"): _efficient,
    ("sdpa_cudnn", "cuda"): _cudnn,
    ("sdpa_math", "cpu"): _math,
    ("sdpa_math", "cuda"): _math,
}
"""The checks of each kernel, by its name and the type of the device."""


def _dense(call: SdpaCall) -> Iterator[Reason]:
    if any(x.form == "nested" for _, x in call.inputs):
        # torch's CUDA kernels take some: it is asked itself where there is a device
        where = "" if call.query.device == "cpu" else ", as far as can be told without the device"
        yield Reason("storage", "nested tensors", f"dense tensors{where}")


def _four_dims(call: SdpaCall) -> Iterator[Reason]:
    if any(x.rank != 4 for _, x in call.inputs):
        yield Reason("rank", _each(call, lambda x: x.rank), "4 dims each", "unsqueeze or flatten")


def _heads(call: SdpaCall, *, grouped: bool, apart: bool = False) -> Iterator[Reason]:
    """`grouped`: takes fewer key/value heads; `apart`: those of keys and values may differ."""
    if any(x.rank != 4 for _, x in call.inputs):
        return
    if len({x.shape[0] for _, x in call.inputs}) > 1:
        yield Reason("batch", _shapes(call), "one batch size", "expand them")
    n, k, v = (x.shape[1] for _, x in call.inputs)
    if not (call.gqa and grouped):
        shared = _SINCE_2_15 and k == v == 1 and call.key.device.startswith("cpu")
        if not n == k == v and not shared:
            yield Reason(
                "GQA",
                f"heads {n}, {k}, {v}",
                "as many key/value as query heads",
                "enable_gqa=True" if grouped else "repeat them",
            )
    elif k != v and not apart:
        yield Reason("GQA", f"{k} key and {v} value heads", "as many of both")
    elif not k or not v or n % k or n % v:
        yield Reason("GQA", f"{n} query heads for {k} and {v}", "a multiple of them")
    if not n or not k or not v:
        yield Reason("heads", f"{n}, {k}, {v}", "1 and more")


def _mask_shape(call: SdpaCall) -> Iterator[Reason]:
    mask = call.mask
    if mask is None:
        return
    if call.mask_grad:
        yield Reason(
            "bias gradient", "an attn_mask that needs a gradient", "masks without gradient"
        )
    if any(x.rank != 4 for _, x in call.inputs):
        return
    (b, n, t, _), s = call.query.shape, call.key.shape[2]
    full = (b, n, t, s)
    pairs = zip(mask.shape, full[-mask.rank :], strict=True) if mask.rank in (2, 4) else ()
    if mask.rank not in (2, 4) or any(m not in (1, f) for m, f in pairs):
        yield Reason(
            "mask",
            f"an attn_mask of shape {mask.shape}",
            f"({t}|1, {s}|1) or ({b}|1, {n}|1, {t}|1, {s}|1)",
        )


def _mask_broadcasts(call: SdpaCall) -> Iterator[Reason]:
    if call.mask is None or any(x.rank != 4 for _, x in call.inputs):
        return
    scores = (*call.query.shape[:3], call.key.shape[2])
    if _broadcast(scores, call.mask.shape) != scores:
        yield Reason(
            "mask", f"an attn_mask of shape {call.mask.shape}", f"what broadcasts to {scores}"
        )


def _head_dims(call: SdpaCall) -> str:
    return _each(call, lambda x: x.size(-1))


def _lengths(call: SdpaCall) -> Iterator[Reason]:
    for fact, x in (("query length", call.query), ("key length", call.key)):
        if x.size(-2) == 0:
            yield Reason(fact, "0", "1 and more")


def _strides(call: SdpaCall, *, singleton: bool, mask: bool) -> Iterator[Reason]:
    one = all(x.stride == 1 for _, x in call.inputs)
    one = one or (singleton and call.query.size(-1) == 1)
    if not one:
        yield Reason(
            "strides", _each(call, lambda x: x.stride), "contiguous last dims", "call contiguous()"
        )
    if mask and call.mask is not None and call.mask.stride != 1:
        yield Reason(
            "strides", f"attn_mask {call.mask.stride}", "contiguous last dims", "call contiguous()"
        )


def _repeated(leads: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], str]:
    """Return the leading dims once key/value heads are repeated, and what is wrong with them."""
    if any(not lead for lead in leads):
        return leads, "a dim of heads"
    n = leads[0][-1]
    if n == leads[1][-1] == leads[2][-1]:
        return leads, ""
    if any(not lead[-1] or n % lead[-1] for lead in leads[1:]):
        return leads, "key/value heads that divide the query's"
    return [(*lead[:-1], n) for lead in leads], ""


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    sizes = []
    for column in zip(*full, strict=True):
        wide = {size for size in column if size != 1}
        if len(wide) > 1:
            return None
        sizes.append(wide.pop() if wide else 1)
    return tuple(sizes)
