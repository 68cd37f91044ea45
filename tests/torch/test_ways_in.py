"""One door: whichever way a call comes in, it is accepted with the same result, or refused alike.

Thousands of random calls, right and wrong, through eager, planned, compiled, NumPy, paged and
quantised calls and torch's own signature.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyattn import (
    Causal,
    Dense,
    DenseBias,
    InvalidProblem,
    PolyattnError,
    errors,
    numpy_attention,
)
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import (
    attention,
    explain,
    paged_attention,
    plan,
    quantize_kv,
    quantized_attention,
)
from polyattn.torch import scaled_dot_product_attention as sdpa
from tests.torch.random_calls import Call, draw

Outcome = tuple[Any, ...]


def outcome(function: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return what a call gives: its arrays, or the class of its error and the first line."""
    try:
        found = function(*args, **kwargs)
    except PolyattnError as error:
        known = vars(errors).values()  # compilers raise classes that are made of these
        kind = next(c for c in type(error).__mro__ if c in known)
        return ("error", kind, str(error).splitlines()[0])
    except Exception as error:  # torch's own, in the drop-in
        return ("error", type(error), str(error) if "dynamo" in type(error).__module__ else "")
    return ("fine", *(found if isinstance(found, tuple) else (found,)))


def assert_alike(door: str, got: Outcome, eager: Outcome, call: Call, bound: float) -> None:
    assert got[0] == eager[0], (door, str(call), got, eager)
    if eager[0] == "error":
        assert got[1:] == eager[1:], (door, str(call), got, eager)
        return
    for mine, theirs in zip(got[1:], eager[1:], strict=True):
        mine = (
            torch.as_tensor(np.asarray(mine, dtype=np.float32))
            if isinstance(mine, np.ndarray)
            else mine
        )
        torch.testing.assert_close(
            mine.float(),
            theirs.float(),
            atol=bound,
            rtol=bound,
            equal_nan=True,
            msg=lambda text: f"{door}: {call}\n{text}",
        )


def bound_of(call: Call) -> float:
    return {torch.bfloat16: 5e-2, torch.float16: 6e-3}.get(getattr(call.q, "dtype", None), 2e-5)


def calls(seed: int, count: int) -> Any:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(count):
        yield draw(rng)


@pytest.mark.parametrize("seed", range(20))
def test_eager_planned_and_explained_calls(seed: int) -> None:
    refused = 0
    for call in calls(seed, 100):
        eager = outcome(attention, call.q, call.k, call.v, **call.options)
        assert eager[0] == "fine" or eager[1] is InvalidProblem, (str(call), eager)
        refused += eager[0] == "error"
        again = outcome(attention, call.q, call.k, call.v, **call.options)
        assert_alike("again", again, eager, call, 0.0)

        def planned(*args: Any, **options: Any) -> Any:
            return plan(*args, **options)(*args)

        assert_alike(
            "plan", outcome(planned, call.q, call.k, call.v, **call.options), eager, call, 0.0
        )
        explained = outcome(explain, call.q, call.k, call.v, **call.options)
        assert explained[0] == eager[0], str(call)
        if eager[0] == "error":
            assert explained == eager, str(call)
    assert 20 <= refused <= 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 29))
def test_compiled_calls(seed: int) -> None:
    for call in calls(seed, 20):
        if call.wrong == "sparse":  # which the compiler itself refuses
            continue
        eager = outcome(attention, call.q, call.k, call.v, **call.options)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, k, v, options: attention(q, k, v, **options), fullgraph=True, backend="eager"
        )
        got = outcome(compiled, call.q, call.k, call.v, call.options)
        assert_alike("compiled", got, eager, call, bound_of(call))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 46))
def test_compiled_calls_of_symbolic_sizes(seed: int) -> None:
    """What symbolic lengths are stood in for by must neither hide a misfit nor make one up."""
    for call in calls(seed, 12):
        if call.wrong == "sparse":
            continue
        eager = outcome(attention, call.q, call.k, call.v, **call.options)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, k, v, options: attention(q, k, v, **options),
            fullgraph=True,
            backend="eager",
            dynamic=True,
        )
        got = outcome(compiled, call.q, call.k, call.v, call.options)
        assert_alike("symbolic", got, eager, call, bound_of(call))


def as_numpy(x: Any) -> Any:
    """Return a call's arrays as NumPy's, also those in masks and biases."""
    if isinstance(x, Tensor):
        return x.numpy()
    return x.map(lambda name, a: as_numpy(a)) if hasattr(x, "map") else x


@pytest.mark.skipif(not isinstance(module.status(), Available), reason="the extension is not built")
@pytest.mark.parametrize("seed", range(50, 70))
def test_numpy_calls(seed: int) -> None:
    for call in calls(seed, 100):
        dtypes = {getattr(x, "dtype", None) for x in (call.q, call.k, call.v)}
        where = [call.options.get("sinks"), getattr(call.options.get("bias"), "payload", None)]
        if (
            dtypes & {torch.bfloat16, torch.float64}  # which NumPy or the kernels do not have
            or call.wrong == "sparse"
            or any(isinstance(x, Tensor) and x.is_meta for x in where)
        ):
            continue
        eager = outcome(attention, call.q, call.k, call.v, **call.options)
        arrays = [as_numpy(x) for x in (call.q, call.k, call.v)]
        got = outcome(numpy_attention, *arrays, **{n: as_numpy(x) for n, x in call.options.items()})
        if got[0] == "error":
            named = (str(got[2]).replace("numpy.ndarray", "torch.Tensor")).replace(
                "ndarray", "Tensor"
            )
            got = (*got[:2], named)
        assert_alike("numpy", got, eager, call, bound_of(call))


@pytest.mark.parametrize("seed", range(70, 80))
def test_paged_calls(seed: int) -> None:
    """Pages are another way to hold keys: the options of the call mean the same."""
    for call in calls(seed, 100):
        mask = call.options.get("mask")
        layout = call.options.get("layout", "BTNH")
        static = mask is None or (hasattr(mask, "is_static") and mask.is_static)
        if not static or (mask is not None and mask.align == "top_left") or "bias" in call.options:
            continue
        if layout not in ("BTNH", "BNTH") or not all(
            isinstance(x, Tensor) and x.dim() == 4 and x.layout == torch.strided
            for x in (call.q, call.k, call.v)
        ):
            continue
        eager = outcome(attention, call.q, call.k, call.v, **call.options)
        b, keys = call.k.shape[0], call.k.shape[2 if layout == "BNTH" else 1]
        table, lengths = torch.arange(b)[:, None], torch.full((b,), keys)
        options = {"mask": None} | call.options
        got = outcome(paged_attention, call.q, call.k, call.v, table, lengths, **options)
        assert_alike("paged", got, eager, call, bound_of(call))


@pytest.mark.parametrize("seed", range(90, 100))
def test_calls_on_codes(seed: int) -> None:
    """Codes are another way to hold keys: the call is that on what they stand for."""
    taken = 0
    for call in calls(seed, 100):
        layout, given = call.options.get("layout", "BTNH"), (call.q, call.k, call.v)
        if layout not in ("BTNH", "BNTH") or not all(
            isinstance(x, Tensor) and x.dim() == 4 and x.layout == torch.strided and not x.is_meta
            for x in given
        ):
            continue
        if len({x.dtype for x in given}) > 1 or any(x.isnan().any() for x in given[1:]):
            continue
        taken += 1
        codes, wide = [], torch.promote_types(call.q.dtype, torch.float32)
        for x in given[1:]:
            codes.append(quantize_kv(x, block_size=1, layout=layout))
        shown = [
            (x.to(wide) * (s.transpose(1, 2) if layout == "BTNH" else s)[..., None]).to(x_as.dtype)
            for (x, s), x_as in zip(codes, given[1:], strict=True)
        ]
        eager = outcome(attention, call.q, *shown, **call.options)
        (k, ks), (v, vs) = codes
        options = {"mask": None} | call.options
        got = outcome(quantized_attention, call.q, k, v, ks, vs, block_size=1, **options)
        assert_alike("codes", got, eager, call, bound_of(call))
    assert taken > 20


@pytest.mark.parametrize("seed", range(80, 90))
def test_calls_with_torchs_signature(seed: int) -> None:
    """What is a call of ours gives the same; what is none is torch's to accept or refuse."""
    for call in calls(seed, 100):
        options = {**call.options, "layout": "BNTH"}
        mask, bias = options.get("mask"), options.get("bias")
        if call.options.get("layout") != "BNTH" or options.keys() & {
            "softcap",
            "sinks",
            "return_lse",
        }:
            continue
        is_causal = isinstance(mask, Causal) and mask.align == "top_left"
        if not (mask is None or is_causal or isinstance(mask, Dense)) or (
            mask is not None and bias is not None
        ):
            continue
        if not (bias is None or isinstance(bias, DenseBias)):
            continue
        theirs = {
            "attn_mask": mask.mask if isinstance(mask, Dense) else getattr(bias, "payload", None),
            "is_causal": is_causal,
            "scale": options.get("scale"),
            "enable_gqa": True,
        }
        got = outcome(sdpa, call.q, call.k, call.v, **theirs)
        eager = outcome(attention, call.q, call.k, call.v, **options)
        if eager[0] == "fine" and got[0] == "fine":
            assert_alike("torch's signature", got, eager, call, bound_of(call))
            continue
        stock = outcome(F.scaled_dot_product_attention, call.q, call.k, call.v, **theirs)
        assert got[0] == stock[0], (str(call), got, stock)
        if stock[0] == "error":
            assert got[1] is stock[1], (str(call), got, stock)
