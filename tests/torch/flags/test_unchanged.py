"""Nothing of polyattn leaves one of torch's switches changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn import Causal, Unsupported, use_backend
from polyattn.selection.registry import registry
from polyattn.torch import attention, explain, plan, scaled_dot_product_attention
from polyattn.torch.flags import flags
from tests.torch import public_calls
from tests.torch.flags.flag_programs import difference, stand

UNUSUAL = {
    "cudnn.benchmark": True, "cudnn.deterministic": True, "cudnn.allow_tf32": False,
    "mkldnn.deterministic": True, "float32_matmul_precision": "high", "warn_always": True,
    "cuda.cudnn_sdp_enabled": False, "cuda.sdp_priority": ["cudnn", "math"],
    "mha.fastpath_enabled": False, "nnpack.enabled": False, "opt_einsum.strategy": "greedy",
    "deterministic_algorithms_warn_only": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False, "num_threads": 3,
    "cuda.preferred_linalg_library": "default", "autograd.multithreading_enabled": False,
}  # fmt: skip
"""Other values than torch starts with: who puts back a default is found out."""

CALLS = dict(public_calls.calls())
BY_CALL = {call: name for name, call in reversed(CALLS.items())}
"""One name for each call: several names may share one."""
TORCH_BACKENDS = [backend.name for backend in registry if backend.framework == "torch"]


@pytest.fixture(params=["as torch starts", "unusual"])
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare everything before and after the test, from two states."""
    with flags(UNUSUAL if request.param == "unusual" else {}):
        before = stand(later=True)
        yield
        left = difference(before, stand(later=True))
    assert not left


def test_every_public_callable_has_a_call() -> None:
    lacking = [name for name, call in CALLS.items() if call is None]
    assert not lacking, "give them an example in the docstring, or a call in public_calls.py"
    assert not public_calls.CALLS.keys() - CALLS.keys(), "gone, or public under another name"
    assert len(CALLS) > 80


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", [name for call, name in BY_CALL.items() if call])
def test_public_callable_leaves_torch_as_it_was(name: str, tmp_path: Path) -> None:
    call = CALLS[name]
    assert call is not None
    call(tmp_path)


def inputs(*, grad: bool) -> list[Any]:
    return [torch.randn(2, 16, 4, 16, requires_grad=grad) for _ in range(3)]


def why_not(name: str, *, grad: bool) -> str:
    """Why a backend does not run the example here, empty if it does."""
    try:
        explain(*inputs(grad=grad), mask=Causal(), backend=name)
    except Unsupported as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", TORCH_BACKENDS)
def test_attention_on_every_backend_leaves_torch_as_it_was(name: str, grad: bool) -> None:
    if why := why_not(name, grad=grad):
        pytest.skip(why[:200])
    q, k, v = inputs(grad=grad)
    before = stand()
    out = attention(q, k, v, mask=Causal(), backend=name)
    assert not difference(before, stand())
    if grad:
        out.sum().backward()
        assert q.grad is not None
        assert not difference(before, stand())


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", TORCH_BACKENDS)
def test_refused_call_leaves_torch_as_it_was(name: str) -> None:
    q, k, v = (torch.randn(2, 3, 4, 5).to(torch.complex64) for _ in range(3))
    with pytest.raises(Exception, match=r"."):
        attention(q, k, v, backend=name)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_compiled_attention_leaves_torch_as_it_was(grad: bool) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(q: Any, k: Any, v: Any) -> Any:
        with use_backend("sdpa_math"):
            first = attention(q, k, v, mask=Causal())
        return first + attention(q, k, v)

    out = function(*inputs(grad=grad))
    if grad:
        out.sum().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("unchanged")
def test_attention_compiled_by_inductor_leaves_torch_as_it_was() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda q, k, v: attention(q, k, v, mask=Causal()))
    function(*inputs(grad=True)).sum().backward()


@pytest.mark.usefixtures("unchanged")
def test_the_drop_in_plans_and_checkpoints_leave_torch_as_it_was() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs(grad=True)
    plan(q, k, v, mask=Causal())(q, k, v)
    scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    with use_backend("sdpa_math"):
        out = checkpoint(lambda *x: attention(*x, mask=Causal()), q, k, v, use_reentrant=False)
    out.sum().backward()
