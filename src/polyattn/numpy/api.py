"""``numpy_attention``, which imports NumPy when it is called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from polyattn.errors import MissingDependency

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from polyattn.masks import Mask
    from polyattn.masks.biases import Bias

__all__ = ["numpy_attention"]


class _Options(TypedDict, total=False):
    """What :func:`numpy_attention` takes beside `return_lse`, for type checkers."""

    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sinks: NDArray[Any] | None
    layout: str
    threads: int | None


@overload
def numpy_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> NDArray[Any]: ...
@overload
def numpy_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def numpy_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
def numpy_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    threads: int | None = None,
) -> Any:
    """Compute softmax(scale * query @ key.T + bias, masked) @ value on NumPy arrays.

    `B` batch, `T` query length, `S` key length, `N` query heads, `K` key/value heads (N is a
    multiple of K), `H` head dim, `V` value dim:

    - `query` (B, T, N, H), `key` (B, S, K, H), `value` (B, S, K, V) of one dtype: float32, float16,
      or bfloat16 (the one of `ml_dtypes`); with ``layout="BNTH"`` heads come second, with
      ``layout="packed"`` query (total, N, H) and so on, and `Packed` is in the mask.
    - `mask`: a :class:`polyattn.Mask`; `bias`: a :class:`polyattn.Bias`, added after the soft cap.
    - `scale`: default 1/sqrt(H). `softcap`: s = softcap * tanh(s / softcap).
    - `sinks`: (N,) or (N, M) logits added to the denominator.
    - `threads`: default all processors that this process may use.

    Returns out (B, T, N, V), contiguous, in the layout and dtype of `query`; with `return_lse`
    also the natural log-sum-exp (B, N, T) float32, (N, total) when packed. A query that sees no
    key gives 0 and -inf. Arrays are read where they lie; one with negative strides, a last dim
    that is not contiguous or another byte order is copied. Other threads run meanwhile.

    Raises :class:`~polyattn.errors.InvalidProblem` for a wrong call and
    :class:`~polyattn.errors.MissingDependency` where NumPy is not installed or the kernels are not
    built.

    >>> import numpy as np
    >>> from polyattn import Causal, numpy_attention
    >>> x = np.random.default_rng(0).standard_normal((1, 4, 2, 8), dtype=np.float32)
    >>> out, lse = numpy_attention(x, x, x, mask=Causal(), return_lse=True)
    >>> out.shape, lse.shape, bool(np.allclose(out[:, 0], x[:, 0]))
    ((1, 4, 2, 8), (1, 2, 4), True)
    """
    try:
        front = importlib.import_module("polyattn.numpy.call")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise MissingDependency(
            "got no package numpy, which numpy_attention needs; pip install 'polyattn[numpy]'."
        ) from error
    return front.attend(
        query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks,
        layout=layout, return_lse=return_lse, threads=threads,
    )  # fmt: skip
