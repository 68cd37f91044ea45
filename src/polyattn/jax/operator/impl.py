"""The base of attention operators: who runs where, in which mode, helpers for masks and heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.kit.devices import kind_of
from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.operator.metadata import AttentionMetadata
from polyattn.jax.operator.output import AttentionOutput
from polyattn.jax.platform import device_of, present_device
from polyattn.jax.sharding.modes import GENERATION_MODES, check_mode, guess_mode
from polyattn.jax.sharding.stable import stable_spec

__all__ = ["AttentionImpl"]


class AttentionImpl(ABC):
    """An implementation of attention under a name; instances hold metadata, and never change it.

    A subclass says its name and `forward_native`; the other ``forward_*`` default to that. Calling
    the instance calls the one of the metadata's backend, or of the device that JAX has where the
    metadata names none: cpu -> `forward_cpu`, tpu -> `forward_tpu`, gpu -> `forward_gpu`, cuda and
    rocm -> theirs, which default to `forward_gpu`. Where the metadata names a device that the
    arrays are not on, the call is refused.

    >>> import jax.numpy as jnp
    >>> from polyattn.jax import AttentionMetadata, AttentionOutput, attention
    >>> class Mine(AttentionImpl):
    ...     @classmethod
    ...     def get_impl_name(cls):
    ...         return "mine"
    ...     def forward_native(self, query, key, value):
    ...         return AttentionOutput(attention_outputs=attention(query, key, value))
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> Mine(AttentionMetadata())(x, x, x).attention_outputs.shape
    (1, 4, 2, 8)
    """

    def __init__(self, metadata: AttentionMetadata) -> None:
        if not isinstance(metadata, AttentionMetadata):
            raise InvalidProblem(
                f"got metadata of type {type(metadata).__name__}, expected AttentionMetadata."
            )
        self.metadata = metadata

    @classmethod
    @abstractmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """Return the name, or all names, that the registry knows the class by."""

    def get_impl_metadata(self) -> AttentionMetadata:
        """Return the metadata that the instance was made with."""
        return self.metadata

    @classmethod
    def get_requirements(cls, mode: str = "__train__") -> dict[str, Any]:
        """Return what a call in a mode needs: the backends that may run it, and a cache or not."""
        return {"backends": {}, "cache": check_mode(mode) in GENERATION_MODES}

    @abstractmethod
    def forward_native(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Compute anywhere."""

    def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Compute on CPUs."""
        return self.forward_native(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Compute on TPUs."""
        return self.forward_native(*args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Compute on GPUs."""
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Compute on NVIDIA's GPUs."""
        return self.forward_gpu(*args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Compute on AMD's GPUs."""
        return self.forward_gpu(*args, **kwargs)

    @own_promotion
    def __call__(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """Run the ``forward_*`` of the metadata's backend; where arrays lie elsewhere, raise."""
        asked = self.metadata.device
        if asked is not None:
            self._check_device(asked, (*args, *kwargs.values()))
        backend = asked or self.current_backend()
        run = getattr(self, f"forward_{backend}", self.forward_native)
        return run(*args, **kwargs)  # type: ignore[no-any-return]

    def _check_device(self, asked: str, arguments: tuple[Any, ...]) -> None:
        mesh = self.metadata.mesh
        arrays = [x for x in arguments if isinstance(x, jax.Array)]
        here = device_of(arrays[0]) if arrays else present_device()[0]
        if isinstance(mesh, jax.sharding.Mesh):
            here = kind_of(mesh.devices.flat[0])
        if here not in (("cuda", "rocm") if asked == "gpu" else (asked,)):
            raise InvalidProblem(
                f"got metadata for {asked} and a call on {here}, expected one device: put the "
                "arrays there (jax.device_put, or jax.default_device for traced code), or leave "
                "backend and platform out of the metadata to run where the arrays are."
            )

    def current_backend(self) -> str:
        """Return where JAX computes by default: "tpu", "gpu" or "cpu"."""
        found = str(jax.default_backend()).lower()
        return "gpu" if found in ("cuda", "rocm") else found

    def get_mode(self, q: Any, BTHD: bool = True, mode: str | None = None) -> str:
        """Return the mode of a call: `mode` where it is said, else a guess from the query.

        One query row is taken for ``__autoregressive__``, more for ``__train__``; prompts and
        pieces of them have to be said.
        """
        return guess_mode(q, BTHD) if mode is None else check_mode(mode)

    @staticmethod
    def repeat_kv_heads(k: jax.Array, v: jax.Array, num_reps: int) -> tuple[jax.Array, jax.Array]:
        """Repeat each key/value head: (B, S, K, H) becomes (B, S, K * num_reps, H).

        No implementation here needs it: grouped heads are never materialised by repeating.
        """
        if not isinstance(num_reps, int) or num_reps < 1:
            raise InvalidProblem(f"got num_reps={num_reps}, expected an integer of 1 or more.")
        return jnp.repeat(k, num_reps, 2), jnp.repeat(v, num_reps, 2)

    def create_stable_sharding(
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: Sequence[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: PartitionSpec | bool | None = True,
        tensor: Any = None,
    ) -> PartitionSpec | None:
        """Return a spec with the axes of some dims alone; see :func:`stable_spec`.

        With a tensor and a mesh in the metadata, an axis that does not fit is an error.
        """
        mesh = self.metadata.mesh
        return stable_spec(state_ps, preserved_indices, clone_ps, dep, tensor, mesh)

    @staticmethod
    def _create_causal_mask(q_len: int, kv_len: int | None = None) -> jax.Array:
        """Return (T, S) booleans of a causal mask, the last query at the last key."""
        kv_len = q_len if kv_len is None else kv_len
        return jnp.arange(kv_len) <= jnp.arange(q_len)[:, None] + kv_len - q_len

    @staticmethod
    def _combine_query_kv_masks(q_mask: jax.Array, kv_mask: jax.Array) -> jax.Array:
        """Return (B, 1, T, S) of which rows (B, T) and which keys (B, S) there are."""
        return q_mask[:, None, :, None] & kv_mask[:, None, None, :]

    @classmethod
    def _split_attention_mask(cls, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the rows (B, T) and keys (B, S) whose product is the mask (B, 1|N, T, S).

        Raises where the mask is known and is no such product: causal and window masks say more
        than two vectors can.
        """
        both = mask if mask.ndim == 3 else mask.any(1)
        rows, keys = both.any(-1), both.any(-2)
        told = cls._combine_query_kv_masks(rows, keys)
        same = (mask if mask.ndim == 4 else mask[:, None]) == told
        if not isinstance(same, jax.core.Tracer) and not bool(same.all()):
            raise InvalidProblem(
                "got a mask that is no product of rows and keys, expected padding: pass causal and "
                "window masks as polyattn masks, or the whole mask as Dense(mask)."
            )
        return rows, keys

    @staticmethod
    def _handle_kvhead(x: jax.Array | None, num_q_heads: int, num_kv_heads: int) -> Any:
        """Return an array (B, heads, T, S) of 1, N or K heads for N of them; None stays."""
        if x is None or x.shape[1] in (1, num_q_heads):
            return x
        if x.shape[1] == num_kv_heads:
            return jnp.repeat(x, num_q_heads // num_kv_heads, 1)
        raise InvalidProblem(
            f"got an array for {x.shape[1]} heads, expected 1, {num_q_heads} or {num_kv_heads}."
        )
