"""The ways in which JAX gets a case: whole, in blocks of other sizes, in shares of several devices.

The truth is one, so that each way shows that results do not depend on how the work is cut.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from polyattn.conformance.cases import Case
from polyattn.errors import InvalidProblem
from polyattn.selection.registry import Backend

__all__ = ["SPREADING", "attending", "paged", "several_devices", "spreading"]

SPREADING = {"jax_ring": "ring", "jax_ulysses": "ulysses", "jax_hybrid": "hybrid"}
"""The operator of each backend for sequences that are spread."""
_SIZES = (1, 3, 7, 16, 33)
_SIZED = {"jax_blockwise": ("block_q", "block_k"), "jax_decode": ("block_k",)}
_DEVICES = 4
_PAGE = 5
_WAYS = 3

Call = Callable[..., Any]
"""``(options, q, k, v, mask, bias, sinks)``"""


def several_devices() -> None:
    """Have JAX see several CPU devices, where it has not looked yet."""
    jax = importlib.import_module("jax")
    try:
        jax.config.update("jax_num_cpu_devices", _DEVICES)
    except RuntimeError:  # it has: what devices there are have to do
        return


def attending(case: Case, backend: Backend) -> Call:
    """Return the call of a backend, in the way that is this case's turn."""
    front = importlib.import_module("polyattn.jax")
    way = case.seed % _WAYS
    if way == 1 and (names := _SIZED.get(backend.name)):
        return _by_blocks(case, backend.name, names)
    if way == 2 and (axes := _axes(case, backend)):
        return _by_shares(case, backend.name, axes)

    def call(options: dict[str, Any], q: Any, k: Any, v: Any, *more: Any) -> Any:
        return front.attention(q, k, v, **options, **_named(*more), backend=backend.name)

    return call


def _named(mask: Any, bias: Any, sinks: Any) -> dict[str, Any]:
    return {"mask": mask, "bias": bias, "sinks": sinks}


def _by_blocks(case: Case, name: str, sizes: tuple[str, ...]) -> Call:
    front = importlib.import_module("polyattn.jax.attend")
    blocks = {
        size: _SIZES[(case.seed // _WAYS + at) % len(_SIZES)] for at, size in enumerate(sizes)
    }

    def call(options: dict[str, Any], q: Any, k: Any, v: Any, *more: Any) -> Any:
        return front.attention_by_blocks(q, k, v, blocks, name, **options, **_named(*more))

    return call


def _axes(case: Case, backend: Backend) -> dict[str, str]:
    """Return by which dims a case is cut in two: batch, heads, and keys every other time.

    Keys are cut where the backend gives the log-sum-exp that joins their parts.
    """
    if importlib.import_module("jax").device_count() < _DEVICES:
        return {}
    packed = case.layout == "packed"
    able = {"batch": case.b % 2 == 0 and not packed, "head": case.n % 2 == 0}
    joins = backend.capabilities_for("cpu").lse
    able["key_sequence"] = joins and case.s % 2 == 0 and not packed and case.seed % 2 == 0
    whole = [name for name, is_able in able.items() if is_able and 0 not in (case.b, case.n)]
    return dict(zip(whole[-2:], ("x", "y"), strict=False))


def _by_shares(case: Case, name: str, axes: dict[str, str]) -> Call:
    front = importlib.import_module("polyattn.jax")
    metadata = front.AttentionMetadata(mesh=_mesh(("x", "y")), partition_axis=_partition(axes))
    mesh_call = importlib.import_module("polyattn.jax.operator.over_mesh").over_mesh
    arguments = importlib.import_module("polyattn.jax.operator.call_arguments").Arguments

    def call(options: dict[str, Any], q: Any, k: Any, v: Any, *more: Any) -> Any:
        given = {**options, **_named(*more), "dropout_key": None}
        with_lse = given.pop("return_lse")

        def attend(q: Any, k: Any, v: Any, **share: Any) -> Any:
            return front.attention(q, k, v, **share, backend=name)

        mode = "__insert__" if "key_sequence" in axes else "__train__"
        found = mesh_call(metadata, attend, arguments(q, k, v, given), mode, with_lse)
        return found if with_lse else found[0]

    return call


def _partition(axes: dict[str, str]) -> Any:
    none = {f"{name}_axis": None for name in ("batch", "sequence", "head", "kv_head")}
    named = {f"{name}_axis": axis for name, axis in axes.items()}
    return importlib.import_module("polyattn.jax").PartitionAxis(**{**none, **named})


def _mesh(names: tuple[str, ...]) -> Any:
    """Return a mesh over all the devices that a case is cut for, or over one."""
    jax, np = importlib.import_module("jax"), importlib.import_module("numpy")
    count = _DEVICES if jax.device_count() >= _DEVICES else 1
    shape = (count,) if len(names) == 1 else (max(count // 2, 1), min(count, 2))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(shape), names)


def spreading(case: Case, backend: Backend) -> Call:
    """Return the call of a backend over a sequence that is spread; it may refuse while traced."""
    front = importlib.import_module("polyattn.jax")
    names = ("ring", "heads") if backend.name == "jax_hybrid" else ("sp",)
    axes = front.PartitionAxis(
        batch_axis=None, sequence_axis=names, head_axis=None, kv_head_axis=None
    )
    metadata = front.AttentionMetadata(mesh=_mesh(names), partition_axis=axes)
    impl = front.AttentionRegistry.create(SPREADING[backend.name], metadata)
    if case.layout == "packed" or case.bias is not None or 0 in (case.b, case.t, case.s):
        raise InvalidProblem("got packed rows, a bias or nothing, expected what can be spread.")

    def call(options: dict[str, Any], q: Any, k: Any, v: Any, *more: Any) -> Any:
        found = impl(
            q, k, v, mask=more[0], softmax_aux=more[2], softmax_scale=options["scale"],
            logits_soft_cap=options["softcap"], return_lse=options["return_lse"],
            BTHD=options["layout"] == "BTNH", mode="__train__",
        )  # fmt: skip
        out = found.attention_outputs
        return (out, found.lse) if options["return_lse"] else out

    return call


def paged(case: Case, backend: Backend) -> Call:
    """Return the call of a backend whose keys lie in pages; it may refuse while traced."""
    jnp = importlib.import_module("jax.numpy")
    front = importlib.import_module("polyattn.jax")
    random = importlib.import_module("numpy").random.default_rng(case.seed)
    count = -(-case.s // _PAGE)
    order = random.permutation(case.b * count)
    if case.layout == "packed" or case.bias is not None or case.grad or 0 in (case.b, case.s):
        raise InvalidProblem("got packed rows, a bias or gradients, expected what pages have.")

    def pages(x: Any, length: int) -> Any:
        """(B, S, K, H), or with heads second, to pages in an order of their own."""
        x = x if length == 1 else jnp.swapaxes(x, 1, 2)
        x = jnp.pad(x, ((0, 0), (0, count * _PAGE - case.s), (0, 0), (0, 0)))
        cut = x.reshape(case.b * count, _PAGE, *x.shape[2:])
        placed = jnp.zeros_like(cut).at[order].set(cut)
        return placed if length == 1 else jnp.swapaxes(placed, 1, 2)

    def call(options: dict[str, Any], q: Any, k: Any, v: Any, *more: Any) -> Any:
        length = 1 if options["layout"] == "BTNH" else 2
        given = {name: options[name] for name in ("scale", "softcap", "layout", "return_lse")}
        return front.paged_attention(
            q, pages(k, length), pages(v, length), jnp.asarray(order.reshape(case.b, count)),
            jnp.full(case.b, case.s), mask=more[0], sinks=more[2], **given, backend=backend.name,
        )  # fmt: skip

    return call
