"""The implementations by name: each is a row that says which backends run it where."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from polyattn.errors import InvalidProblem, UnknownBackend
from polyattn.jax.attend import attention, attention_by_blocks
from polyattn.jax.kit.layouts import to_bnth
from polyattn.jax.operator.asked_backends import PLAIN, blocks_of, of_platform
from polyattn.jax.operator.call_arguments import arguments
from polyattn.jax.operator.impl import AttentionImpl
from polyattn.jax.operator.impl_registry import AttentionRegistry
from polyattn.jax.operator.output import AttentionOutput
from polyattn.jax.operator.over_mesh import over_mesh, spread_over
from polyattn.jax.operator.paged_impl import PagedAttention
from polyattn.jax.operator.probabilities import attention_weights
from polyattn.jax.sequence_parallel.hybrid import hybrid_attention
from polyattn.jax.sequence_parallel.ring import ring_attention
from polyattn.jax.sequence_parallel.ulysses import ulysses_attention
from polyattn.jax.sharding.modes import AUTOREGRESSIVE, GENERATION_MODES, check_mode
from polyattn.selection.registry import registry

__all__ = [
    "ROWS", "HybridAttention", "PagedAttention", "PolyattnImpl", "RingAttention",
    "SequenceParallelImpl", "UlyssesAttention",
]  # fmt: skip

ROWS: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...] = (
    # names, then the backends of each device in order; of others those of "native"
    (("vanilla",), {"native": ("jax_reference",)}),
    (("sdpa", "cudnn", "cuda_flash_attn2"), {
        "native": ("jax_xla", "jax_blockwise"), "cuda": ("jax_cudnn", "jax_xla", "jax_blockwise"),
    }),
    (("flash_attn2", "flash"), {
        "native": ("jax_blockwise",), "cpu": ("native_cpu", "jax_blockwise"),
        "gpu": ("pallas", "jax_blockwise"), "tpu": ("pallas", "splash", "jax_blockwise"),
    }),
    (("splash", "blocksparse"), {
        "native": ("jax_blockwise",), "cpu": ("native_cpu", "jax_blockwise"),
        "gpu": ("pallas", "jax_blockwise"), "tpu": ("splash", "pallas", "jax_blockwise"),
    }),
    (("blockwise",), {"native": ("jax_blockwise",)}),
    (("native_cpu",), {"native": ("native_cpu",)}),
    (("autoregressive_decodeattn", "decode"), {
        "native": ("jax_decode", "jax_blockwise"),
        "cpu": ("native_cpu", "jax_decode", "jax_blockwise"),
    }),
)  # fmt: skip


class PolyattnImpl(AttentionImpl):
    """An implementation that calls :func:`polyattn.jax.attention` with backends of its own.

    Takes what :func:`~polyattn.jax.operator.call_arguments.arguments` takes, and `return_weights`,
    `return_lse` and `mode`; gives an :class:`AttentionOutput`. With a mesh in the metadata the
    call runs on each device's share of batch and heads.
    """

    names: ClassVar[tuple[str, ...]] = ()
    backends: ClassVar[dict[str, tuple[str, ...]]] = {}

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return cls.names

    @classmethod
    def get_requirements(cls, mode: str = "__train__") -> dict[str, Any]:
        return {"backends": dict(cls.backends), "cache": check_mode(mode) in GENERATION_MODES}

    def _run(
        self,
        device: str,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        return_weights: bool = False,
        return_lse: bool = False,
        mode: str | None = None,
        **options: Any,
    ) -> AttentionOutput:
        call = arguments(self.metadata, query, key, value, **options)
        layout = call.options["layout"]
        if layout != "packed":
            mode = self.get_mode(call.query, layout == "BTNH", mode)
        elif mode is not None:
            check_mode(mode)
        if return_weights and call.options["dropout_p"] > 0:
            raise InvalidProblem(
                "got return_weights with dropout, expected one of them: the weights are those "
                "before entries are dropped, and would not give the output."
            )
        wanted, blocks = self._registered(device), blocks_of(self.metadata)

        def attend(q: Any, k: Any, v: Any, **given: Any) -> Any:
            return attention_by_blocks(q, k, v, blocks, **given, backend=wanted)

        # who is not asked for the log-sum-exp may be one that has none
        out, lse = over_mesh(self.metadata, attend, call, mode, return_lse or return_weights)
        weights = None
        if return_weights:
            q, k = (to_bnth(x, layout) for x in (call.query, call.key))
            told = {name: call.options[name] for name in ("mask", "bias", "softcap")}
            scale = call.options["scale"]
            told["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
            lifted = lse[None] if layout == "packed" else lse
            weights = attention_weights(q, k, lifted, **told)
        return AttentionOutput(weights, out, lse if return_lse else None)

    def _registered(self, device: str) -> tuple[str, ...]:
        """Return the backends of a device that there are, in order."""
        chosen = self.backends.get(device) or self.backends.get(_FAMILY.get(device, ""))
        chosen = of_platform(self.metadata, self.names[0], chosen or self.backends["native"])
        here = registry.names("jax")
        found = tuple(name for name in chosen if name in here)
        if not found:
            raise UnknownBackend(
                f"got {self.names[0]!r} on {device}, which runs on {' or '.join(chosen)}, expected "
                f"a backend that is registered: {', '.join(here)}."
            )
        return found

    def forward_native(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self._run("native", *args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self._run("cpu", *args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self._run("gpu", *args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self._run("cuda", *args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self._run("rocm", *args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self._run("tpu", *args, **kwargs)


_FAMILY = {"cuda": "gpu", "rocm": "gpu"}


def _declare(names: tuple[str, ...], backends: dict[str, tuple[str, ...]]) -> None:
    title = "".join(part.title() for part in names[0].split("_"))
    about = f"Attention as {' or '.join(names)}: {', '.join(backends['native'])} anywhere."
    made = type(f"{title}Attention", (PolyattnImpl,), {
        "names": names, "backends": backends, "__doc__": about, "__module__": __name__,
    })  # fmt: skip
    globals()[made.__name__] = made  # where pickle looks for the class of an instance
    AttentionRegistry.register(made)


for _names, _backends in ROWS:
    _declare(_names, _backends)


class SequenceParallelImpl(AttentionImpl):
    """Attention over a sequence that the mesh's sequence axis spreads; arrays are whole.

    The axis is that of the metadata's partition axes, else its `sequence_axis_name`; batch and
    heads are spread too. Takes what :class:`PolyattnImpl` takes but for bias, dropout and packed
    rows, and `local`: the backend of what each device computes. In ``__autoregressive__`` the
    query is one row, which cannot be spread: each device attends to the keys that it has.
    """

    names: ClassVar[tuple[str, ...]] = ()
    attend: ClassVar[Any] = None

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return cls.names

    def forward_native(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        local: str | tuple[str, ...] | None = None,
        return_lse: bool = False,
        mode: str | None = None,
        **options: Any,
    ) -> AttentionOutput:
        if sizes := blocks_of(self.metadata):
            raise InvalidProblem(
                f"got {sizes} for {self.names[0]!r}, whose steps choose their own, expected the "
                "default sizes."
            )
        call = arguments(self.metadata, query, key, value, **options)
        mode = self.get_mode(call.query, call.options["layout"] == "BTNH", mode)
        if local is None and self.metadata.platform in ("jax", "xla", "pallas", "triton"):
            local = of_platform(self.metadata, self.names[0], (*PLAIN, "pallas", "splash"))
        if mode == AUTOREGRESSIVE:

            def attend(q: Any, k: Any, v: Any, **given: Any) -> Any:
                return attention(q, k, v, **given, backend=local)

            out, lse = over_mesh(self.metadata, attend, call, mode, return_lse)
        else:
            more = {"backend": local, **self._steps()}
            out, lse = spread_over(self.metadata, type(self).attend, call, mode, more)
        return AttentionOutput(None, out, lse if return_lse else None)

    def _steps(self) -> dict[str, Any]:
        """Return how the steps of a ring run, where there is one."""
        return {"unroll": not self.metadata.scan_ring_attention}


@AttentionRegistry.register
class RingAttention(SequenceParallelImpl):
    """Keys and values travel around the devices; see :mod:`polyattn.jax.sequence_parallel.ring`."""

    names = ("ring",)
    attend = staticmethod(ring_attention)


@AttentionRegistry.register
class UlyssesAttention(SequenceParallelImpl):
    """Rows are exchanged for heads; see :mod:`polyattn.jax.sequence_parallel.ulysses`."""

    names = ("ulysses",)
    attend = staticmethod(ulysses_attention)

    def _steps(self) -> dict[str, Any]:
        return {}


@AttentionRegistry.register
class HybridAttention(SequenceParallelImpl):
    """Ulysses within a ring; see :mod:`polyattn.jax.sequence_parallel.hybrid`.

    The metadata's sequence axis is two axes of the mesh: of the ring, and of the exchange.
    """

    names = ("hybrid", "ring_ulysses")
    attend = staticmethod(hybrid_attention)

    def forward_native(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        axis = self.metadata.sequence_axis
        if not isinstance(axis, tuple) or len(axis) != 2:
            raise InvalidProblem(
                f"got the sequence axis {axis!r} for 'hybrid', expected two axes of the mesh: of "
                "the ring and of the exchange, as sequence_axis_name=('ring', 'heads')."
            )
        return super().forward_native(*args, **kwargs)
