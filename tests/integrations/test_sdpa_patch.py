import subprocess
import sys
import threading
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_before

from polyattn import Unsupported, record_selections, use_backend
from polyattn.integrations.sdpa_patch import route_sdpa, routed
from polyattn.torch.dropin import torch_sdpa


class Heard:
    def __init__(self):
        self.log, self.reasons = [], []

    def ran(self, selection, call):
        self.log.append((selection.backend, call is not None))

    def passed(self, reason, call):
        self.reasons.append(reason)


@pytest.fixture
def q():
    return torch.randn(2, 4, 16, 8)


def places():
    return (
        F.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        imported_before,
    )


def test_every_reference_is_routed_and_restored_exactly(q):
    before = places()
    assert all(place is torch_sdpa for place in before)
    heard = Heard()
    with route_sdpa(heard), route_sdpa():
        assert F.scaled_dot_product_attention is routed is imported_before
        for call in places():
            call(q, q, q)
    with pytest.raises(ZeroDivisionError), route_sdpa():
        raise ZeroDivisionError
    assert all(place is torch_sdpa for place in places())
    assert heard.log == [("sdpa_flash", True)] * 3


def test_names_imported_inside_are_restored_as_well(q):
    namespace = {}
    with route_sdpa():
        exec("from torch.nn.functional import scaled_dot_product_attention", namespace)
        assert namespace["scaled_dot_product_attention"] is routed
    # what no module holds is torch's function after the routing
    kept = namespace["scaled_dot_product_attention"]
    compiled = torch.compile(lambda x: kept(x, x, x), backend="eager", fullgraph=True)
    with record_selections() as ran, use_backend("reference"):
        for call in (lambda x: kept(x, x, x), compiled):
            assert torch.equal(call(q), torch_sdpa(q, q, q))
        kept(q[0, 0], q[0, 0], q[0, 0])  # which a request would forbid
    assert not ran
    with route_sdpa(), record_selections() as ran:
        kept(q, q, q)
        compiled(q)
    assert len(ran) == 2


def test_multihead_attention_and_what_goes_to_torch(q):
    heard = Heard()
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 5, 32, requires_grad=True)
    with route_sdpa(heard):
        layer(x, x, x, need_weights=False)[0].sum().backward()
        F.scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0])
    assert heard.log == [("sdpa_flash", True)]
    assert heard.reasons == ["inputs of 2, 2 and 2 dims"]


def test_a_wrong_call_gives_torchs_own_error(q):
    with pytest.raises(RuntimeError) as stock:
        torch_sdpa(q, q[..., :3], q)
    with route_sdpa(), pytest.raises(RuntimeError) as ours:
        F.scaled_dot_product_attention(q, q[..., :3], q)
    assert str(ours.value) == str(stock.value)


def test_compiled_programs_keep_working(q):
    heard = Heard()
    with route_sdpa(heard):
        function = torch.compile(
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True) * 2,
            backend="eager",
            fullgraph=True,
        )
        operator = torch.compile(
            lambda x: torch._C._nn.scaled_dot_product_attention(x, x, x),
            backend="eager",
            fullgraph=True,
        )
        inside = function(q)
        torch.testing.assert_close(operator(q), torch_sdpa(q, q, q))
    assert heard.log[0] == ("sdpa_flash", False)
    torch.testing.assert_close(inside, 2 * torch_sdpa(q, q, q, is_causal=True))
    torch.testing.assert_close(function(q), inside)


ROUTED_FIRST = """
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from polyattn.integrations.sdpa_patch import route_sdpa

sdpa, layer = F.scaled_dot_product_attention, F.multi_head_attention_forward
q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
biases = [causal_upper_left(4, 6), causal_lower_right(4, 6)]
attend = lambda *arrays: F.scaled_dot_product_attention(*arrays)
expected = [attend(q, k, k, bias) for bias in biases]


def compiled():
    torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager")(q)
    torch._dynamo.reset()
    for bias, result in zip(biases, expected):
        ours = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, k, bias)
        torch.testing.assert_close(ours, result)


with route_sdpa():
    compiled()
    for name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        torch.overrides.resolve_name(getattr(F, name))
compiled()
for function in (sdpa, layer):
    assert torch.overrides.resolve_name(function) == f"torch.nn.functional.{function.__name__}"
    assert function in torch.overrides.get_testing_overrides()
    assert function in torch.overrides.get_overridable_functions()[F]
"""


def test_what_torch_lists_for_good_is_its_own_though_routing_came_first():
    subprocess.run([sys.executable, "-c", ROUTED_FIRST], check=True, timeout=300)


def test_traces_keep_torchs_operator(q):
    with route_sdpa():
        traced = torch.jit.trace(lambda x: F.scaled_dot_product_attention(x, x, x), (q,))
        symbolic = torch.fx.symbolic_trace(Attends())
        exported = torch.export.export(Attends(), (q,))
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    assert any(node.target is torch_sdpa for node in symbolic.graph.nodes)
    assert "aten.scaled_dot_product_attention" in exported.graph_module.code


class Attends(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Mine(torch.Tensor):
    seen: ClassVar[list] = []
    stock = (torch_sdpa,)  # routing replaces what modules hold, and nothing else

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func is cls.stock[0])
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_see_torchs_function_and_modes_are_transparent(q):
    heard = Heard()
    mine = q.as_subclass(Mine)
    with route_sdpa(heard):
        F.scaled_dot_product_attention(mine, mine, mine)
        with torch.device("cpu"):
            F.scaled_dot_product_attention(q, q, q)
    assert True in Mine.seen
    assert heard.reasons == ["a tensor of type Mine"]
    assert heard.log == [("sdpa_flash", True)]


def test_causal_bias_of_torch(q):
    from torch.nn.attention.bias import causal_lower_right

    want = F.scaled_dot_product_attention(q, q, q, causal_lower_right(16, 16))
    with route_sdpa():
        got = F.scaled_dot_product_attention(q, q, q, causal_lower_right(16, 16))
    torch.testing.assert_close(got, want)


def test_a_request_holds_in_other_threads_and_is_never_dropped(q):
    heard = Heard()
    with route_sdpa(heard, use_backend("sdpa_math")):
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q))
        thread.start()
        thread.join()
        with use_backend("reference"):
            F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(Unsupported):
            F.scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0])
    assert heard.log == [("sdpa_math", True), ("reference", True)]


def test_the_programs_own_recorder_still_records(q):
    with route_sdpa(Heard()), record_selections() as ran:
        F.scaled_dot_product_attention(q, q, q)
    assert [one.backend for one in ran] == ["sdpa_flash"]


def test_the_quick_way_ends_where_somebody_listens_or_asks(q):
    expected = torch_sdpa(q, q, q)
    with route_sdpa():
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q)
        heard = Heard()
        with route_sdpa(heard):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
        with route_sdpa(heard, use_backend("sdpa_math")):
            F.scaled_dot_product_attention(q, q, q)
            with route_sdpa():
                F.scaled_dot_product_attention(q, q, q)
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected)
        with record_selections() as ran:
            F.scaled_dot_product_attention(q, q, q)
    assert heard.log == [("sdpa_flash", True), ("sdpa_math", True), ("sdpa_math", True)]
    assert [one.backend for one in ran] == ["sdpa_flash"]
    assert torch.equal(routed(q, q, q), expected)
