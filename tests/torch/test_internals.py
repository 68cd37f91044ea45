"""Private names of torch: every one has a row, and the rows agree with the torch that is here."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from polyattn.errors import MissingDependency
from polyattn.torch import internals
from polyattn.torch.internals import memory, modules, private_names, state, switches

ROOT = Path(__file__).resolve().parents[2]
VERSION = ".".join(torch.__version__.split(".")[:2])
CUDA = torch.version.cuda is not None or torch.version.hip is not None


@pytest.mark.parametrize("path", internals.ROWS)
def test_a_row_says_in_which_torch_the_name_is(path: str) -> None:
    row = internals.ROWS[path]
    assert row.otherwise and row.seen and set(row.seen) <= set(internals.LOOKED_AT)
    there = row.find() is not private_names.MISSING
    if row.build and not CUDA:
        pytest.skip(f"this is not {row.build}")
    if VERSION in internals.LOOKED_AT:
        assert there == (VERSION in row.seen), f"{path} in torch {torch.__version__}"


def test_names_are_torchs_own_objects() -> None:
    """So a call of one costs what it costs in torch."""
    assert internals.current_graph_task is torch._C._current_graph_task_id
    assert internals.is_deterministic is torch._C._get_deterministic_algorithms
    assert internals.is_grad_enabled is torch._C.is_grad_enabled
    assert internals.saved_tensor_hooks is torch._C._autograd._top_saved_tensors_default_hooks
    assert internals.are_transforms_active is torch._C._are_functorch_transforms_active
    assert internals.torch_sdpa is torch._C._nn.scaled_dot_product_attention
    assert internals.dispatch_modes is torch._C._len_torch_dispatch_stack
    assert internals.tracing_state is torch._C._get_tracing_state
    assert internals.any_requires_grad is torch._C._any_requires_grad
    assert internals.is_lazy_copy is torch._C._is_cow_tensor
    assert internals.is_zero_tensor is torch.Tensor._is_zerotensor
    assert internals.dual_levels is torch.autograd.forward_ad
    aten = torch.ops.aten
    assert internals.math_attention is aten._scaled_dot_product_attention_math.default
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert internals.flash_attention_for_cpu is getattr(torch, name)
    assert internals.flash_operator_for_cpu is getattr(aten, name).default


def test_a_missing_name_without_another_way_refuses_when_it_is_called() -> None:
    path = "torch._C._of_a_torch_to_come"
    try:
        with pytest.raises(MissingDependency, match=r"no torch\._C\._of_a_torch_to_come.*Without"):
            private_names.private(path, "nothing goes", seen=("2.15",))(1, x=2)
        with pytest.raises(MissingDependency, match="nothing goes"):
            private_names.deferred(path, "nothing goes")()
        assert private_names.private(path, "another way", len) is len
        assert private_names.deferred(path, "another way", len)() is len
    finally:
        del private_names.ROWS[path]


def test_the_slower_ways_say_the_same() -> None:
    """What stands in for a name, beside the name, in the states that it is asked about."""
    t = torch.nn.Linear(3, 2)
    assert dict(t.named_parameters(recurse=False, remove_duplicate=False)) == dict(
        modules.own_parameters(t)
    )
    nested = torch.nn.Sequential(t, torch.nn.ReLU())
    assert dict(nested.named_children()) == dict(modules.children_of(nested))
    for on in (True, False):
        torch.use_deterministic_algorithms(on)
        try:
            assert state.is_deterministic() is torch.are_deterministic_algorithms_enabled() is on
        finally:
            torch.use_deterministic_algorithms(False)
    for name, public in (
        ("sdpa_flash", torch.backends.cuda.flash_sdp_enabled),
        ("sdpa_efficient", torch.backends.cuda.mem_efficient_sdp_enabled),
        ("sdpa_cudnn", torch.backends.cuda.cudnn_sdp_enabled),
        ("sdpa_math", torch.backends.cuda.math_sdp_enabled),
    ):
        assert internals.is_allowed[name]() is public()
    assert (state.tracing_state() is None) is not torch.jit.is_tracing()
    assert switches.matmul_precision() == torch.get_float32_matmul_precision()
    views = torch.arange(12.0).view(3, 4)[1:, 2:], torch.ones(5, dtype=torch.float16)[3:]
    for x in (*views, torch.empty(0)):
        assert memory.read_address(x) == memory.address_of(x) == x.data_ptr()


def test_the_compiler_calls_what_is_marked_constant_while_it_traces() -> None:
    seen = []

    @internals.mark_constant
    def now() -> int:
        seen.append(torch.compiler.is_dynamo_compiling())
        return 7

    run = torch.compile(lambda x: x + now(), backend="eager", fullgraph=True)
    assert [run(torch.zeros(())).item() for _ in range(2)] == [7, 7]
    assert len(seen) == 1


def test_without_any_of_the_names_polyattn_is_imported_and_attends(tmp_path: Path) -> None:
    """In a torch that lacks all names but those that torch's own code needs at every step."""
    code = """
        import torch
        q = torch.randn(2, 5, 3, 8)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, q, q)), is_causal=True
        ).transpose(1, 2)
        # such a torch has its public functions, by another way
        for place, public, name in (
            (torch, "are_deterministic_algorithms_enabled", "_get_deterministic_algorithms"),
            (torch.backends.cuda, "flash_sdp_enabled", "_get_flash_sdp_enabled"),
            (torch.backends.cuda, "mem_efficient_sdp_enabled", "_get_mem_efficient_sdp_enabled"),
            (torch.backends.cuda, "cudnn_sdp_enabled", "_get_cudnn_sdp_enabled"),
            (torch.backends.cuda, "math_sdp_enabled", "_get_math_sdp_enabled"),
        ):
            setattr(place, public, getattr(torch._C, name))
        for name in (
            "_current_graph_task_id", "_get_deterministic_algorithms", "_is_fwd_grad_enabled",
            "_are_functorch_transforms_active", "_len_torch_dispatch_stack",
            "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled",
            "_get_math_sdp_enabled", "_can_use_flash_attention", "_AutoDispatchBelowAutograd",
            "_get_fp32_precision_getter", "_get_cudnn_benchmark", "_has_xpu",
            "_get_sdp_priority_order", "_get_blas_preferred_backend", "_is_cow_tensor",
            "_data_address", "_dispatch_tls_is_dispatch_key_included", "_any_requires_grad",
        ):
            delattr(torch._C, name)
        del torch._C._autograd._top_saved_tensors_default_hooks
        del torch._C._functorch.maybe_current_level
        del torch._C._functorch.is_functorch_wrapped_tensor
        del torch._scaled_dot_product_flash_attention_for_cpu
        del torch.autograd.forward_ad._current_level
        del torch._C._dynamo.guards.TensorGuards
        del torch._C._dynamo.eval_frame.set_code_exec_strategy

        import polyattn.hooks, polyattn.torch.flags
        from polyattn import Causal
        from polyattn.errors import MissingDependency
        from polyattn.torch import attention, internals, scaled_dot_product_attention
        for backend in (None, "sdpa_flash", "reference", "native_cpu"):
            for _ in range(2):
                torch.testing.assert_close(attention(q, q, q, mask=Causal(), backend=backend), want)
        scaled_dot_product_attention(q, q, q, is_causal=True)
        try:
            internals.current_graph_task()
        except MissingDependency as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has no torch._C._current_graph_task_id" in done.stdout


def test_the_internals_import_no_compiler(tmp_path: Path) -> None:
    code = """
        import sys
        import torch
        before = set(sys.modules)
        import polyattn.torch.internals.switches
        print([n for n in set(sys.modules) - before if not n.startswith("polyattn")
               and n.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# --- the check that forbids the names elsewhere ---


def complaints(text: str) -> list[str]:
    check = {"__file__": str(ROOT / "scripts/check_private_names.py"), "__name__": "check"}
    source = (ROOT / "scripts/check_private_names.py").read_text()
    exec(compile(source, check["__file__"], "exec"), check)
    tree = ast.parse(textwrap.dedent(text))
    return list(check["complaints"](tree, check["known_names"](), check["own_names"]({"": tree})))


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._C import is_grad_enabled",
        "from torch import _C",
        "import torch\ntorch._C._nn",
        "import torch as t\nt._assert(1, 2)",
        "from torch import nn\nnn.modules.dropout._DropoutNd",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "def f(x): return x._version",
        "def f(x): return x._is_zerotensor()",
        "def f(m): return m._forward_hooks",
        "class A(B.Module):\n    def f(self): self._modules = {}; return self._modules",
        "class A:\n    def f(self): self._modules = {}\n    def g(self, m): return m._modules",
        "from torch.autograd import forward_ad as levels\nlevels._current_level",
        "where = 'torch._C._set_sdp_use_fa3'",
        "f'{1} torch._inductor.config'",
        "name = '_get_cudnn_enabled'",
    ],
)
def test_the_check_finds(text: str) -> None:
    assert complaints(text)


@pytest.mark.parametrize(
    "text",
    [
        '"""Stands in for torch._C._nn.scaled_dot_product_attention."""',
        "import torch\ntorch.__version__",
        "import sys\nsys._getframe(1)",
        "class A:\n    def f(self): self._own = 1\n    def g(self, other): return other._own",
        "class A:\n    def f(self): self._modules = {}\n    def g(self): return self._modules",
        "from polyattn.torch.internals import dual_levels\ndual_levels._current_level",
        "from collections import namedtuple\ndef f(x): return x._replace(a=1)",
        "kept = ('torch._', 'torch.jit')",
    ],
)
def test_the_check_leaves_alone(text: str) -> None:
    assert complaints(text) == []
