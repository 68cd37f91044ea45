"""The mask that models of transformers hand from where it is made to their attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.integrations.transformers.fewer_queries import last_queries
from polyattn.masks import Full, Mask
from polyattn.torch.kit.masking import Dims, bind_mask, materialise

__all__ = ["AttentionMaskValue"]


class AttentionMaskValue:
    """A mask of polyattn in the place of a tensor (B, 1, T, S) of booleans, True = attend.

    Models pass it on as they pass a tensor. One that looks into it (slices, operators, functions
    of torch) sees that tensor, which is made then: slower, and right. Adding it to scores adds 0
    where it allows and the least number where not, as the tensor of transformers' eager
    attention does.

    `added`: the dtype of what a model that the library runs on eager attention alone finds when it
    looks: the numbers that are added, as eager attention has them; None for booleans.

    `mask` is about the first `limit` of the S keys; nobody sees those after them, which a cache
    of fixed length has not written yet.

    >>> from polyattn import Causal
    >>> value = AttentionMaskValue(Causal(), (1, 1, 2, 4), limit=3, device="cpu")
    >>> value.shape, value.mask, (value & True)[0, 0].int().tolist()
    (torch.Size([1, 1, 2, 4]), Causal(), [[1, 1, 0, 0], [1, 1, 1, 0]])
    """

    def __init__(
        self,
        mask: Mask | None,
        shape: tuple[int, int, int, int],
        *,
        limit: int | None = None,
        device: Any = "cpu",
        added: torch.dtype | None = None,
    ) -> None:
        self.mask = Full() if mask is None else mask
        self.sizes = shape
        self.limit = shape[3] if limit is None else limit
        self.device = torch.device(device)
        self.added = added

    @property
    def shape(self) -> torch.Size:
        """(B, 1, T, S)."""
        return torch.Size(self.sizes)

    @property
    def ndim(self) -> int:
        """4, as of the tensor."""
        return 4

    @property
    def dtype(self) -> torch.dtype:
        """As of the tensor: boolean, or that of what is added."""
        return torch.bool if self.added is None else self.added

    def dim(self) -> int:
        """Return 4, as the tensor does."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """Return all sizes or one, as the tensor does."""
        return self.shape if dim is None else self.sizes[dim]

    def dense(self) -> Tensor:
        """Return the mask as a tensor (B, 1, T, S) of booleans, True = attend."""
        batch, heads, queries, keys = self.sizes
        dims = Dims(batch, heads, heads, queries, self.limit)
        bound = bind_mask(self.mask, self.device)
        seen = materialise(bound, dims, self.device).expand(batch, heads, queries, self.limit)
        return torch.nn.functional.pad(seen, (0, keys - self.limit))

    def looked_at(self) -> Tensor:
        """Return the tensor that a model finds when it looks into the mask."""
        return self.dense() if self.added is None else self.additive(self.added)

    def _as(
        self, mask: Mask, shape: tuple[int, int, int, int], device: torch.device
    ) -> AttentionMaskValue:
        return AttentionMaskValue(mask, shape, limit=self.limit, device=device, added=self.added)

    def additive(self, dtype: torch.dtype) -> Tensor:
        """Return 0 where the mask allows, the least number of `dtype` elsewhere: (B, 1, T, S)."""
        zero = torch.zeros((), dtype=dtype, device=self.device)
        return torch.where(self.dense(), zero, torch.finfo(dtype).min)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask on another device; in another dtype it is the tensor."""
        wanted = [*args, *kwargs.values()]
        dtypes = [x for x in wanted if isinstance(x, torch.dtype)]
        if dtypes != [self.dtype] * len(dtypes) or any(isinstance(x, Tensor) for x in wanted):
            return self.looked_at().to(*args, **kwargs)
        devices = [x for x in wanted if type(x) in (str, int, torch.device)]
        if not devices or torch.device(devices[0]) == self.device:
            return self
        device = torch.device(devices[0])
        moved = bind_mask(self.mask, device)
        return self._as(moved, self.sizes, device)

    def contiguous(self, *args: Any, **kwargs: Any) -> AttentionMaskValue:
        """Return the mask itself: its arrays are as they are."""
        return self

    def clone(self, *args: Any, **kwargs: Any) -> AttentionMaskValue:
        """Return the mask itself: nothing changes it."""
        return self

    def __getitem__(self, index: Any) -> Any:
        found = _kept(index, self.sizes)
        if found is None:
            return self.looked_at()[index]
        first, keys = found
        if first == 0 and keys == self.sizes[3]:
            return self
        mask = last_queries(self.mask, self.sizes[2], first)
        if mask is None or keys < self.limit:
            return self.looked_at()[index]
        shape = (*self.sizes[:2], self.sizes[2] - first, keys)
        return self._as(mask, shape, self.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("mask", "sizes", "limit", "device", "added"):
            raise AttributeError(name)  # not made yet, as while it is unpickled
        return getattr(self.looked_at(), name)

    def __len__(self) -> int:
        return self.sizes[0]

    def __bool__(self) -> bool:
        return bool(self.looked_at())

    def __repr__(self) -> str:
        kept = "" if self.limit == self.sizes[3] else f" of the first {self.limit} keys"
        return f"AttentionMaskValue({self.mask!r}{kept}, {tuple(self.sizes)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        if others and func in _ADDING:
            args = [x.additive(others[0].dtype) if isinstance(x, cls) else x for x in args]
        return func(*_as_tensors(args), **_as_tensors(kwargs or {}))

    def __and__(self, other: Any) -> Any:
        if (
            isinstance(other, AttentionMaskValue)
            and other.sizes == self.sizes
            and other.limit == self.limit
            and not {self.mask.align, other.mask.align} >= {"top_left", "bottom_right"}
        ):
            joined = self.mask & other.mask
            return self._as(joined, self.sizes, self.device)
        return self.looked_at() & other

    def __or__(self, other: Any) -> Any:
        return self.looked_at() | other

    def __xor__(self, other: Any) -> Any:
        return self.looked_at() ^ other

    def __rand__(self, other: Any) -> Any:
        return other & self.looked_at()

    def __ror__(self, other: Any) -> Any:
        return other | self.looked_at()

    def __invert__(self) -> Tensor:
        return ~self.looked_at()

    def __add__(self, other: Any) -> Any:
        added: Any = torch.add  # which asks this class for its own way
        return added(other, self) if isinstance(other, Tensor) else self.looked_at() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.looked_at()

    def __sub__(self, other: Any) -> Any:
        return self.looked_at() - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.looked_at().to(torch.float32)

    def __mul__(self, other: Any) -> Any:
        return self.looked_at() * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.looked_at()

    def __eq__(self, other: object) -> Any:
        return self.looked_at() == other

    def __ne__(self, other: object) -> Any:
        return self.looked_at() != other

    __hash__ = object.__hash__


_ADDING = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


def _as_tensors(x: Any) -> Any:
    if isinstance(x, AttentionMaskValue):
        return x.looked_at()
    if isinstance(x, (list, tuple)):
        return type(x)(map(_as_tensors, x)) if type(x) in (list, tuple) else x
    return {name: _as_tensors(held) for name, held in x.items()} if type(x) is dict else x


def _kept(index: Any, sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the first query and the number of keys that slices keep, or None for another index."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(part, slice) and part is not Ellipsis for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (4 - len(parts) + 1)
    if len(parts) > 4 or Ellipsis in parts:
        return None
    parts += [slice(None)] * (4 - len(parts))
    ranges = [part.indices(size) for part, size in zip(parts, sizes, strict=True)]
    whole = [(0, size, 1) for size in sizes]
    (first, end, step), (start, keys, stride) = ranges[2], ranges[3]
    if ranges[:2] != whole[:2] or (end, step) != (sizes[2], 1) or (start, stride) != (0, 1):
        return None
    return (first, keys) if first < end else None
