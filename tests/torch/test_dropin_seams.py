"""What polyattn does not model stays torch's, the same through every door, and is recorded.

Doors: the drop-in called, the drop-in in the place of torch's function, routing; each eager and
compiled.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from polyattn import Unsupported, record_selections, settings, use_backend
from polyattn.integrations.sdpa_patch import route_sdpa, routed
from polyattn.torch import scaled_dot_product_attention as sdpa
from polyattn.torch.dropin import torch_sdpa

Case = Callable[[Callable[..., Any]], Any]
DOORS = ("called", "in place", "routed")


class Doubling(torch.Tensor):
    """Compares with what stands in torch's namespace, as CausalBias does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class Tripling(torch.Tensor):
    """Looks the function up in a table that was made before anything was routed."""

    known: ClassVar[dict[Any, int]] = {torch_sdpa: 3}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.known:
            with torch._C.DisableTorchFunctionSubclass():
                return cls.known[func] * func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


torch.manual_seed(0)
Q, K = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 32, 8)
SHOWN = torch.ones(16, 16, dtype=torch.bool).tril()
STRIDED = torch.nested.nested_tensor([torch.randn(2, 5, 8), torch.randn(2, 3, 8)])
JAGGED = torch.nested.nested_tensor(
    [torch.randn(5, 2, 8), torch.randn(3, 2, 8)], layout=torch.jagged
)

COMPILED: dict[str, Case] = {
    "2 dims": lambda f: f(Q[0, 0], Q[0, 1], Q[0, 0]),
    "3 beside 4 dims": lambda f: f(Q[0], Q, Q),
    "head dim 0": lambda f: f(Q[..., :0], Q[..., :0], Q),
    "broadcast batch": lambda f: f(Q.expand(3, 2, 16, 8), Q, Q),
    "meta": lambda f: f(Q.to("meta"), Q.to("meta"), Q.to("meta"), is_causal=True),
    "scale=nan": lambda f: f(Q, Q, Q, scale=float("nan")),
    "causal bias, upper left": lambda f: f(Q, K, K, causal_upper_left(16, 32)),
    "causal bias, lower right": lambda f: f(Q, K, K, causal_lower_right(16, 32)),
}
EAGER: dict[str, Case] = {
    **COMPILED,
    "vmap": lambda f: torch.func.vmap(lambda x: f(x, x, x))(Q.expand(3, 1, 2, 16, 8)),
    "grad": lambda f: torch.func.grad(lambda x: f(x, x, x).square().sum())(Q),
    "jit.trace": lambda f: torch.jit.trace(lambda x: f(x, x, x), (Q,), check_trace=False)(K),
    "fx": lambda f: torch.fx.symbolic_trace(lambda x: f(x, x, x))(K),
    "strided nested": lambda f: f(STRIDED, STRIDED, STRIDED),
    "jagged batches": lambda f: f(JAGGED, JAGGED, JAGGED),  # attention over the dim of size 2
    "a subclass that compares": lambda f: f(*[Q.as_subclass(Doubling)] * 3),
    "a subclass with a table": lambda f: f(*[Q.as_subclass(Tripling)] * 3),
    "mask beside causal": lambda f: f(Q, Q, Q, SHOWN, 0.0, True),
    "numpy scale": lambda f: f(Q, Q, Q, scale=np.float32(0.5)),
}


@contextlib.contextmanager
def through(door: str) -> Iterator[Callable[..., Any]]:
    """Give the function that a program would call; torch's is put back."""
    before = F.scaled_dot_product_attention
    try:
        if door == "called":
            yield sdpa
        elif door == "in place":
            F.scaled_dot_product_attention = sdpa
            yield lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs)
        else:
            with route_sdpa():
                yield lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs)
    finally:
        F.scaled_dot_product_attention = before


def result(case: Case, function: Callable[..., Any]) -> Any:
    """Return what a call gives; of an error its class."""
    try:
        return case(function)
    except Unsupported:
        raise
    except Exception as error:
        return type(error)


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, type):
        assert ours is theirs
        return
    assert type(ours) is type(theirs)
    if theirs.is_nested:
        ours, theirs = (
            torch.cat([x.flatten() for x in ours.unbind()]),
            torch.cat([x.flatten() for x in theirs.unbind()]),
        )
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if theirs.device.type != "meta":
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def left_to_torch(ran: list[Any]) -> Any:
    """Return the note of the call that was left to torch."""
    return next(choice for choice in ran if choice.backend == "torch")


@pytest.mark.filterwarnings("ignore")  # torch's own, of vmap, nested tensors and traces
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", EAGER)
def test_eager_calls_are_torchs_and_noted(case: str, door: str) -> None:
    sdpa(Q, Q, Q), sdpa(Q, K, K)  # dense calls of the same options came before
    theirs = result(EAGER[case], torch_sdpa)
    with through(door) as function, record_selections() as ran:
        assert_same(result(EAGER[case], function), theirs)
    assert left_to_torch(ran).fallback is None
    fallback = use_backend("native_cpu", on_unsupported="fallback")
    with through(door) as function, record_selections() as ran, fallback:
        assert_same(result(EAGER[case], function), theirs)
    assert left_to_torch(ran).fallback.startswith("SCOPE asks for native_cpu, but polyattn does")
    refused = pytest.raises(Unsupported, match=r"got a call that polyattn does not model \(")
    with through(door) as function, use_backend("native_cpu"), refused:
        EAGER[case](function)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_calls_are_torchs_and_noted(case: str, door: str) -> None:
    theirs = result(COMPILED[case], torch_sdpa)

    def compiled(function: Any) -> Any:
        torch._dynamo.reset()
        call = lambda *args, **kwargs: function(*args, **kwargs)  # noqa: E731
        return torch.compile(call, fullgraph=True, backend="aot_eager")

    with through(door) as function, record_selections() as ran:
        assert_same(result(COMPILED[case], compiled(function)), theirs)
    assert left_to_torch(ran).fallback is None
    fallback = use_backend("native_cpu", on_unsupported="fallback")
    with through(door) as function, record_selections() as ran, fallback:
        assert_same(result(COMPILED[case], compiled(function)), theirs)
    assert left_to_torch(ran).fallback.startswith("SCOPE asks for native_cpu, but polyattn does")
    refused = pytest.raises(Unsupported, match=r"got a call that polyattn does not model \(")
    with through(door) as function, use_backend("native_cpu"), refused:
        COMPILED[case](compiled(function))


@pytest.mark.parametrize("door", DOORS)
def test_a_compiled_subclass_with_its_own_answer_gives_it(door: str) -> None:
    for kind, factor in ((Doubling, 2), (Tripling, 3)):
        torch._dynamo.reset()
        with through(door) as function:
            call = torch.compile(lambda x: function(x, x, x), backend="eager")
            for _ in range(2):
                torch.testing.assert_close(call(Q.as_subclass(kind)), factor * torch_sdpa(Q, Q, Q))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_dynamic_length_compile_in_one_graph(kind: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, m: sdpa(q, q, q, attn_mask=m), fullgraph=True, backend="eager", dynamic=dynamic
    )
    for length in (70, 90, 110):
        q = torch.randn(1, 2, length, 16)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if kind == "float":
            mask = torch.zeros(length, length).masked_fill(~mask, float("-inf"))
        torch.testing.assert_close(call(q, mask), torch_sdpa(q, q, q, attn_mask=mask))


def test_refusals_name_the_wish_and_nothing_untrue() -> None:
    refused = pytest.raises(Unsupported, match=r"since SCOPE forbids sdpa_math\. Lift")
    with use_backend(never="sdpa_math", on_unsupported="fallback"), refused as raised:
        sdpa(Q[0, 0], Q[0, 0], Q[0, 0])
    assert "on_unsupported" not in str(raised.value)  # which would not lift a "never"
    torch._dynamo.reset()
    wrong = torch.compile(lambda: sdpa(Q.expand(3, 2, 16, 8), Q, Q), fullgraph=True)
    with use_backend("native_cpu"), pytest.raises(Unsupported, match=r"shapes like these") as found:
        wrong()
    assert "(0, " not in str(found.value)  # sizes of the model are not those of the call
    for option in ("is_causal", "enable_gqa"):
        with use_backend("native_cpu"), pytest.raises(Unsupported, match=rf"\({option}=1\)"):
            sdpa(Q, Q, Q, **{option: 1})


def test_the_environment_allows_a_fallback_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", "native_cpu")
    monkeypatch.setenv("POLYATTN_ON_UNSUPPORTED", "fallback")
    settings.reload()
    try:
        for door in DOORS:
            with through(door) as function, record_selections() as ran:
                function(Q[0, 0], Q[0, 0], Q[0, 0])
                function(Q, Q, Q, dropout_p=0.5)  # modelled, but nothing for native_cpu
                function(Q, Q, Q)
            assert [choice.backend == "torch" for choice in ran] == [True, False, False], door
            assert ran[0].fallback.startswith("ENV asks for native_cpu")
            assert ran[1].fallback and ran[1].backend != "native_cpu"
            assert ran[2].fallback is None and ran[2].backend == "native_cpu"
    finally:
        monkeypatch.undo()
        settings.reload()


@pytest.mark.parametrize("function", [sdpa, routed])
def test_scale_and_enable_gqa_are_keywords_as_in_torch(function: Any) -> None:
    names = inspect.signature(function).parameters
    keywords = [name for name, x in names.items() if x.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keywords == ["scale", "enable_gqa"]
    for wrong in (torch_sdpa, function):
        with pytest.raises(TypeError, match="takes from 3 to 6 positional arguments but 7"):
            wrong(Q, Q, Q, None, 0.0, False, 0.5)
    assert_same(function(Q, Q, Q, None, 0.0, True), torch_sdpa(Q, Q, Q, None, 0.0, True))


def test_a_compiled_wrong_mask_is_refused_as_torch_does() -> None:
    for mask in (torch.zeros(16, 16, dtype=torch.float64), torch.ones(16, dtype=torch.bool)):
        torch._dynamo.reset()
        call = torch.compile(lambda m: sdpa(Q, Q, Q, attn_mask=m), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=r"attn_mask|Dimension out of range|dims"):
            call(mask)


def test_graphs_hold_torchs_function() -> None:
    graph = torch.fx.symbolic_trace(lambda x: sdpa(x, x, x, is_causal=True)).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets == [torch_sdpa]
    traced = torch.jit.trace(lambda x: sdpa(x, x, x), (Q,), check_trace=False)
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    scripted = torch.jit.script(_scripted)
    assert "aten::scaled_dot_product_attention" in str(scripted.graph)
    assert_same(scripted(Q), torch_sdpa(Q, Q, Q, is_causal=True, scale=0.5))


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return sdpa(x, x, x, is_causal=True, scale=0.5)


class Heard(torch.overrides.TorchFunctionMode):
    """Notes what it is asked of, and lets it run."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.log.append((function, len(args), sorted(kwargs or {})))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_function_modes_are_asked_of_the_call_and_of_nothing_in_it(grad):
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=grad) for _ in range(3))
    for backend in ("native_cpu", "sdpa_flash"):
        with use_backend(backend):
            expected = sdpa(q, k, v, scale=0.3)
            with Heard() as mode:
                out = sdpa(q, k, v, scale=0.3)
        assert mode.log == [(sdpa, 6, ["enable_gqa", "scale"])]
        torch.testing.assert_close(out, expected)


def test_a_function_mode_may_answer_by_itself():
    class Answering(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return args[0] + 1 if function is sdpa else NotImplemented

    q = torch.randn(1, 2, 8, 16)
    with Answering():
        out = sdpa(q, q, q)
    assert torch.equal(out, q + 1)
