"""Compiled inference on the native kernels: one operator, read by the extension itself."""

import pytest
import torch

import polyattn.backends.native_cpu.torch as native_cpu  # noqa: F401 - defines the operators
from polyattn import Causal, DenseBias, Window
from polyattn.backends.native_cpu.torch.inference import native_inference
from polyattn.masks import Dense, Padding
from polyattn.torch import attention

torch.manual_seed(0)
Q, K = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 40, 16)
PLAIN = (None, None, [], [], "BNTH", 0.25, 0.0)


def reference(q, k, mask=None, bias=None):
    options = {"mask": mask, "bias": bias, "layout": "BNTH", "scale": 0.25}
    return attention(q, k, k, backend="reference", **options)


def graph_of(function, *args, **options):
    """Compile a function, run it, and return the result and the operators of its graph."""
    torch.compiler.reset()  # a limit of torch on the codes of one function
    seen = []

    def keep(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    found = torch.compile(function, backend=keep, fullgraph=True, **options)(*args)
    return found, seen


CASES = {
    "plain": lambda: (None, None),
    "causal": lambda: (Causal(), None),
    "window": lambda: (Causal() & Window(left=7), None),
    "padding": lambda: (Padding(kv_lengths=torch.tensor([40, 9])), None),
    "padding and causal": lambda: (Padding(kv_lengths=torch.tensor([33, 0])) & Causal(), None),
    "dense": lambda: (Dense(torch.rand(2, 1, 3, 40) < 0.6), None),
    "bias": lambda: (None, DenseBias(torch.randn(1, 4, 3, 40))),
    "both": lambda: (Dense(torch.rand(3, 40) < 0.6), DenseBias(torch.randn(40))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_for_inference_holds_it(name, dynamic):
    mask, bias = CASES[name]()

    def call(q, k):
        return attention(
            q, k, k, mask=mask, bias=bias, layout="BNTH", scale=0.25, backend="native_cpu"
        )

    found, seen = graph_of(call, Q, K, dynamic=dynamic)
    assert any("native_inference" in target for target in seen), seen
    torch.testing.assert_close(found, reference(Q, K, mask, bias), rtol=2e-5, atol=2e-5)


def test_training_and_exports_hold_the_other():
    def call(q, k):
        return attention(q, k, k, layout="BNTH", backend="native_cpu")

    q = Q.clone().requires_grad_()
    found, seen = graph_of(call, q, K)
    assert not any("native_inference" in target for target in seen)
    found.sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        _, seen = graph_of(call, q, K)
    assert any("native_inference" in target for target in seen)

    class Model(torch.nn.Module):
        def forward(self, q, k):
            return call(q, k)

    graph = torch.export.export(Model(), (Q, K)).graph
    assert not any("native_inference" in str(node.target) for node in graph.nodes)


def test_a_graph_compiled_without_gradients_is_compiled_again_with_them():
    compiled = torch.compile(
        lambda q, k: attention(q, k, k, layout="BNTH", backend="native_cpu"), backend="aot_eager"
    )
    compiled(Q, K)
    q = Q.clone().requires_grad_()
    compiled(q, K).square().sum().backward()
    p = Q.clone().requires_grad_()
    attention(p, K, K, layout="BNTH", backend="native_cpu").square().sum().backward()
    torch.testing.assert_close(q.grad, p.grad)


def test_gradients_and_tangents_are_refused_or_taken_elsewhere():
    with pytest.raises(RuntimeError, match="compile the function again"):
        native_inference(Q.clone().requires_grad_(), K, K, *PLAIN)
    with torch.no_grad():
        native_inference(Q.clone().requires_grad_(), K, K, *PLAIN)

    def call(q):
        return attention(q, K, K, layout="BNTH", scale=0.25, backend="native_cpu")

    tangent = torch.randn_like(Q)
    jvp = torch.compile(lambda q, t: torch.func.jvp(call, (q,), (t,)), backend="aot_eager")
    for one, two in zip(jvp(Q, tangent), torch.func.jvp(call, (Q,), (tangent,)), strict=True):
        torch.testing.assert_close(one, two)


def test_it_is_mapped():
    qs, ks = torch.randn(3, *Q.shape), torch.randn(3, *K.shape)
    found = torch.vmap(lambda q, k: native_inference(q, k, k, *PLAIN))(qs, ks)
    wanted = torch.stack([reference(q, k) for q, k in zip(qs, ks, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    over_keys = torch.vmap(lambda k: native_inference(Q, k, k, *PLAIN))(ks)
    torch.testing.assert_close(over_keys[1], reference(Q, ks[1]), rtol=2e-5, atol=2e-5)
    compiled = torch.compile(
        torch.vmap(lambda q: attention(q, K, K, layout="BNTH", backend="native_cpu")),
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(qs)[2], reference(qs[2], K), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch._lazy_clone(x),
        lambda x: torch._neg_view(-x),
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: x.clone()[:, :1].expand(x.shape),
    ],
)
def test_tensors_of_every_kind(change):
    q, k = change(Q), change(K)
    found = native_inference(q, k, k, *PLAIN)
    torch.testing.assert_close(found, reference(q.clone(), k.clone()), rtol=2e-5, atol=2e-5)


def test_it_is_an_operator_as_torch_wants_them():
    for arguments in (
        (Q, K, K, *PLAIN),
        (Q, K, K, torch.rand(2, 1, 3, 40) < 0.5, None, [], [], "BNTH", 0.25, 5.0),
        (Q, K, K, None, torch.randn(3, 40), [1, -7, 0, 1], [], "BNTH", 0.25, 0.0),
    ):
        torch.library.opcheck(
            native_inference, arguments, test_utils=("test_schema", "test_faketensor")
        )


def test_small_compiled_calls_stay_torchs():
    def call(q, k):
        return attention(q, k, k, layout="BNTH")

    small = graph_of(call, torch.randn(1, 4, 1, 16), torch.randn(1, 4, 20, 16))[1]
    assert not any("native" in target for target in small), small
