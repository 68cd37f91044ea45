"""What differs between machines: Triton's GPUs, Mosaic's TPUs, and the interpreter on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

__all__ = ["Machine", "Tiling", "dot", "head_size", "tiling"]

Array: TypeAlias = jax.Array
_LANES = 128
_LEAST = 16  # of a product in Triton, in each dim


class Tiling(NamedTuple):
    """The sizes of a tile, and how a GPU works on it; hashable."""

    q: int
    k: int
    warps: int
    stages: int


class Machine(NamedTuple):
    """A kind of device, by its name in problems; on `cpu` kernels are interpreted."""

    device: str

    @property
    def is_tpu(self) -> bool:
        """Whether Mosaic lowers the kernel, for a core that keeps its blocks in VMEM."""
        return self.device == "tpu"

    def places(self) -> tuple[Any, Any, Any]:
        """Return which batch entry, head and block a program of the grid computes."""
        ids = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        return ids if self.is_tpu else ids[::-1]

    def grid(self, batch: int, heads: int, blocks: int) -> tuple[int, int, int]:
        """Return the grid in which the blocks of a head run after each other, or near each other.

        On a TPU the last dim is the fastest, on a GPU the first.
        """
        return (batch, heads, blocks) if self.is_tpu else (blocks, heads, batch)

    def spec(self, shape: tuple[int | None, ...], index: Callable[..., Any]) -> Any:
        """Return the block of an array that a program gets; `index` takes (b, n, i)."""
        return pl.BlockSpec(shape, index if self.is_tpu else lambda i, n, b: index(b, n, i))

    def scalars(self) -> Any:
        """Return the specification of whole arrays of which single numbers are read."""
        if not self.is_tpu:
            return pl.BlockSpec()
        from jax.experimental.pallas import tpu

        return pl.BlockSpec(memory_space=tpu.SMEM)

    def call(self, kernel: Any, name: str, tiling: Tiling, **options: Any) -> Any:
        """Return ``pallas_call`` with what this machine wants to know."""
        if self.is_tpu:
            from jax.experimental.pallas import tpu

            params: Any = tpu.CompilerParams(dimension_semantics=("parallel",) * 3)
        elif self.device != "cpu":
            from jax.experimental.pallas import triton

            params = triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages)
        else:
            return pl.pallas_call(kernel, name=name, interpret=True, **options)
        return pl.pallas_call(kernel, name=name, compiler_params=params, **options)


def head_size(machine: Machine, size: int) -> int:
    """Return what a head dim is padded to: Triton's tiles are powers of two."""
    return size if machine.is_tpu else max(_LEAST, 1 << math.ceil(math.log2(max(size, 1))))


def tiling(
    machine: Machine, config: Any, lengths: tuple[int, int], head: int, maps: Any, backward: bool
) -> Tiling:
    """Return the tile of a pass: as the config says or as fits, a part of every map's block."""
    if machine.is_tpu:
        q, k, warps, stages = 256, 512, 0, 0
    elif head > 128:  # what a block of a GPU holds
        q, k, warps, stages = (32, 32, 4, 1) if backward else (64, 32, 4, 2)
    elif backward:
        q, k, warps, stages = 64, 64, 4 if head <= 64 else 8, 2
    else:
        q, k, warps, stages = 128, 64 if head > 64 else 128, 4 if head <= 64 else 8, 2
    q, k = int(config.get("block_q", q)), int(config.get("block_k", k))
    least = (_LANES if machine.is_tpu else _LEAST,) * 2
    q, k = (
        min(size, max(1 << (length - 1).bit_length(), low))
        for size, length, low in zip((q, k), lengths, least, strict=True)
    )
    for one in maps:
        q, k = math.gcd(q, one.block_q), math.gcd(k, one.block_k)
    return Tiling(q, k, int(config.get("num_warps", warps)), int(config.get("num_stages", stages)))


def dot(machine: Machine, a: Array, b: Array, over: tuple[int, int]) -> Array:
    """Return the product over one dim of each, float32; float32 inputs lose nothing."""
    if machine.device == "cpu":  # XLA's CPUs have no product of float16; these are exact
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)
