"""``paged_attention`` for JAX: keys and values in pages, as serving systems keep them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.errors import InvalidProblem
from polyattn.jax.admission import FRONT, Call
from polyattn.jax.dispatch import run
from polyattn.jax.kit.masking import known, signed
from polyattn.jax.sharding.explicit import ExplicitPlace
from polyattn.jax.sharding.spread_pages import over_pages
from polyattn.masks import Causal, Mask
from polyattn.problem import Problem
from polyattn.problem.admission import admit_pages, check_lengths

__all__ = ["paged_attention"]

_CAUSAL = Causal()


def paged_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    block_table: jax.Array,
    lengths: jax.Array,
    *,
    mask: Mask | None = _CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    backend: str | tuple[str, ...] | list[str] | None = None,
) -> Any:
    """Attend to keys that lie in pages: key ``j`` of sequence ``b`` is row ``j % page_size`` of
    page ``block_table[b, j // page_size]``.

    `B` sequences, `T` queries each (1 when decoding), `N` query and `K` key/value heads, `P` pages:

    - `query` (B, T, N, H): the last T positions of each sequence, whose keys are in the cache
      already; (B, N, T, H) with ``layout="BNTH"``.
    - `key_pages` (P, page_size, K, H), `value_pages` (P, page_size, K, V); with ``layout="BNTH"``
      (P, K, page_size, H) and so on.
    - `block_table` (B, most pages) integers; entries past a sequence's length mean nothing.
    - `lengths` (B,) integers: how many keys each sequence has. Both may be NumPy's, of any width.
    - `mask`: causal unless told otherwise; None, or masks of positions (`Causal`, `Window`,
      `Chunked`, `Dilated`, `FirstKeys`) joined by &, | and ~, each measured on the sequence's own
      length.

    `scale`, `softcap`, `sinks`, `return_lse`, `backend`: see :func:`polyattn.jax.attention`.
    Returns out (B, T, N, V) in the layout of `query`, with `return_lse` also lse (B, N, T).

    Table and lengths may be traced; then nobody can check what they hold: pages that are not there
    give the keys of others.

    Raises :class:`~polyattn.errors.InvalidProblem` for a wrong call and
    :class:`~polyattn.errors.Unsupported` when the request cannot be met.

    >>> import jax, jax.numpy as jnp
    >>> pages = jax.random.normal(jax.random.key(0), (8, 16, 2, 32))  # eight pages of 16 keys
    >>> table, lengths = jnp.array([[5, 0], [3, 7]]), jnp.array([20, 3])
    >>> query = jax.random.normal(jax.random.key(1), (2, 1, 4, 32))
    >>> paged_attention(query, pages, pages, table, lengths).shape
    (2, 1, 4, 32)
    """
    block_table, lengths = _counted(block_table), _counted(lengths)
    problem = admit_pages(
        query, key_pages, value_pages, block_table, lengths, front=FRONT, mask=mask,
        layout=layout, scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse,
    )  # fmt: skip
    _check_known(problem, block_table, lengths, key_pages.shape[0])
    sinks = None if sinks is None else jnp.asarray(sinks)
    pages = jnp.asarray(block_table), jnp.asarray(lengths)
    place = ExplicitPlace.of((query, key_pages, value_pages), layout)
    if place is None:
        call = Call(problem, mask, None, sinks)
        return run(call, query, key_pages, value_pages, None, backend, pages)

    def share(*arrays: Any) -> Any:
        *rest, part_of_sinks = arrays
        return paged_attention(
            *rest, mask=mask, scale=scale, softcap=softcap, sinks=part_of_sinks, layout=layout,
            return_lse=True, backend=backend,
        )  # fmt: skip

    spread, head_dim = (place.batch, place.head), 2 if layout == "BTNH" else 1
    arrays = query, key_pages, value_pages, *pages, sinks
    out, lse = over_pages(place.mesh, spread, share, arrays, head_dim)
    return (out, lse) if return_lse else out


def _counted(x: Any) -> Any:
    """Return integers as kernels read them; NumPy's of 64 bits in 32, since they count pages."""
    if isinstance(x, jax.Array) and x.dtype.kind in "iu":
        return signed(x)
    limits = np.iinfo(np.int32)
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu":
        return x
    if x.size and (x.min() < limits.min or x.max() > limits.max):
        raise InvalidProblem(
            f"got pages or lengths from {x.min()} to {x.max()}, expected numbers of 32 bits."
        )
    return jnp.asarray(x, jnp.int32)


def _check_known(problem: Problem, table: Any, lengths: Any, count: int) -> None:
    """Check what lengths and table hold, where that waits for nobody."""
    each, rows = known(lengths), known(table)
    if each is None or not each.size:
        return
    check_lengths(int(each.min()), int(each.max()), problem)
    if rows is None:
        return
    used = np.arange(rows.shape[1]) * (problem.paged or 1) < each[:, None]
    if bool((used & ((rows < 0) | (rows >= count))).any()):
        raise InvalidProblem(
            f"got a block table that does not fit {count} pages: it holds "
            f"{rows[used].tolist()[:8]}, expected 0 to {count - 1}."
        )
