"""The one-line comparison of a port's own tests: verdicts, conditions, and what it leaves."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from torch import nn

from polyattn.errors import TraceError
from polyattn.hooks import ModuleHookManager, assert_same_activations
from polyattn.trace.compare import Floor, Verdict, compare
from polyattn.trace.compare.calibration import save
from tests.hooks.recording import state_of
from tests.trace.recorders.torch.traced_models import llama, tokens


def mlp(activation: nn.Module | None = None, size: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(size, size), activation or nn.GELU(), nn.Linear(size, size)
    return nn.Sequential(*layers).eval()


def inputs(rows: int = 4, size: int = 16) -> torch.Tensor:
    return torch.linspace(-2, 2, rows * size).view(rows, size)


def failed(*args: Any, **options: Any) -> Verdict:
    """The verdict of a comparison that fails."""
    with pytest.raises(AssertionError) as caught:
        assert_same_activations(*args, **options)
    verdict = caught.value.verdict  # type: ignore[attr-defined]
    assert isinstance(verdict, Verdict) and str(verdict) == str(caught.value)
    return verdict


def blamed(*args: Any) -> str | None:
    """The module that a comparison which fails names."""
    return getattr(failed(*args).culprit, "module", None)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, so that a test sees what is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_right_port_gives_the_verdict_and_leaves_nothing(temporary: Path) -> None:
    reference, port = mlp(), mlp()
    before = [state_of(module) for module in (*reference.modules(), *port.modules())]
    verdict = assert_same_activations(reference, port, inputs())
    assert verdict.equal is True and verdict.coverage.compared == 4
    assert (verdict.reference, verdict.port) == ("", "")
    assert [state_of(module) for module in (*reference.modules(), *port.modules())] == before
    assert list(temporary.iterdir()) == []


def test_a_wrong_module_is_named_first(temporary: Path) -> None:
    port = mlp(nn.GELU(approximate="tanh"))
    verdict = failed(mlp(), port, inputs())
    assert verdict.culprit is not None and verdict.culprit.module == "1"
    assert str(verdict).startswith("different: the output of '1'; its inputs agree\n")
    assert all(not len(ModuleHookManager.of(module).names) for module in port.modules())
    assert list(temporary.iterdir()) == []


def test_a_wrong_weight_is_named() -> None:
    port = mlp()
    with torch.no_grad():
        port[2].weight[3] *= 1.01
    culprit = failed(mlp(), port, inputs()).culprit
    assert culprit is not None
    assert (culprit.module, culprit.kind, culprit.tensor) == ("2", "parameter", "weight")


@pytest.mark.parametrize(
    "given",
    [
        lambda ids: ids,
        lambda ids: (ids,),
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        lambda ids: lambda model: model.model(ids).last_hidden_state,
    ],
    ids=["tensor", "tuple", "dict", "function"],
)
def test_every_form_of_inputs(given: Any) -> None:
    reference, port = llama(), llama()
    port.model.layers[1].mlp.act_fn = nn.GELU()
    assert assert_same_activations(reference, reference, given(tokens())).equal
    assert blamed(reference, port, given(tokens())) == "model.layers.1.mlp.act_fn"


def test_inputs_of_a_tokeniser_and_a_cache_are_copied() -> None:
    transformers = pytest.importorskip("transformers")
    model = llama()
    cache = transformers.DynamicCache()
    given = transformers.BatchEncoding({"input_ids": tokens()})
    assert assert_same_activations(model, model, given).equal
    kept = {"input_ids": tokens(), "past_key_values": cache, "use_cache": True}
    assert assert_same_activations(model, model, kept).equal
    assert cache.get_seq_length() == 0  # neither run wrote into it


class Greedy(nn.Module):
    """Changes its argument in place."""

    def forward(self, x: Any) -> Any:
        return x.mul_(2) + 1


def test_each_model_gets_its_own_copy() -> None:
    x = inputs()
    model = nn.Sequential(Greedy(), nn.Linear(16, 16)).eval()
    assert assert_same_activations(model, model, (x,)).equal
    assert torch.equal(x, inputs())


class Twice(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        assert x is y
        return x + y


def test_one_tensor_given_twice_stays_one() -> None:
    x = inputs()
    assert assert_same_activations(Twice(), Twice(), (x, x)).equal


class Noisy(nn.Module):
    """Draws from all generators that models draw from."""

    def forward(self, x: Any) -> Any:
        return x + torch.rand(()) + random.random() + float(np.random.rand())


def test_both_get_the_same_random_numbers_which_are_put_back() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert assert_same_activations(nn.Sequential(Noisy()), nn.Sequential(Noisy()), inputs()).equal
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


class Counting(nn.Linear):
    """Computes something else each time."""

    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_model_that_does_not_repeat_itself_is_not_blamed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Counting(16, 16)).eval()
    verdict = failed(model, model, inputs())
    assert verdict.equal is None and verdict.culprit is None
    assert "does not repeat itself" in str(verdict)


def test_random_numbers_are_said_where_they_may_be_why() -> None:
    port = nn.Sequential(mlp(), Noisy(), Noisy())
    verdict = failed(nn.Sequential(mlp(), nn.Identity(), Noisy()), port, inputs())
    assert "drew random numbers" in str(verdict)
    assert "drew" not in str(failed(mlp(), mlp(nn.SiLU()), inputs()))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.25

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(x, self.attention_dropout, self.training)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.AlphaDropout(0.1), Drops()])
def test_active_dropout_is_refused_and_no_mode_is_switched(dropout: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), dropout).train()
    with pytest.raises(TraceError, match=r"the port in training mode with dropout on in '1'"):
        assert_same_activations(copy.deepcopy(model).eval(), model, torch.ones(2, 4))
    assert model.training and dropout.training
    assert assert_same_activations(model.eval(), model, torch.ones(2, 4)).equal


def test_training_mode_without_dropout_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4), nn.LSTM(4, 4))
    assert assert_same_activations(model.train(), model, torch.randn(3, 4)).equal


def test_weights_without_values_are_refused() -> None:
    with torch.device("meta"):
        port = mlp()
    with pytest.raises(TraceError, match=r"the port with '0.weight' on the meta device"):
        assert_same_activations(mlp(), port, inputs())


def test_weights_that_accelerate_brings_are_none_that_lack() -> None:
    accelerate = pytest.importorskip("accelerate")
    port = accelerate.cpu_offload(mlp(nn.SiLU()), execution_device="cpu")
    assert all(weight.is_meta for weight in port.parameters())
    assert blamed(mlp(), port, inputs()) == "1"
    assert assert_same_activations(mlp(nn.SiLU()), port, inputs()).equal


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((inputs(), mlp(), mlp()), "got a Tensor as the reference, expected a torch.nn.Module"),
        ((mlp(), mlp(), [inputs()]), "got inputs of type list"),
        ((mlp(), mlp(), ((i for i in ()),)), "cannot be copied"),
    ],
)
def test_what_is_no_model_or_no_inputs_is_refused(given: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        assert_same_activations(*given)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TraceError, match="isolate='always'"):
        assert_same_activations(mlp(), mlp(), inputs(), isolate="always")
    with pytest.raises(TraceError, match=r"layers='nowhere', which matches none"):
        assert_same_activations(mlp(), mlp(), inputs(), layers="nowhere")


class Raises(nn.Module):
    def forward(self, x: Any) -> Any:
        raise KeyError("the model's own")


def test_what_a_model_raises_goes_on_and_nothing_stays(temporary: Path) -> None:
    reference, port = mlp(), nn.Sequential(nn.Linear(16, 16), Raises()).eval()
    before = [state_of(module) for module in port.modules()]
    state = torch.get_rng_state()
    for _ in range(2):  # a hook or a trace left on it would be an error
        with pytest.raises(KeyError, match="the model's own"):
            assert_same_activations(reference, port, inputs(), folder=temporary / "kept")
    assert [state_of(module) for module in port.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert list(temporary.iterdir()) == []


def test_a_shared_module_and_the_same_model() -> None:
    reference = mlp()
    port = nn.Sequential(reference[0], nn.SiLU(), reference[2]).eval()
    assert blamed(reference, port, inputs()) == "1"
    assert assert_same_activations(reference, reference, inputs()).equal


def test_rules_tolerance_floor_and_layers_are_those_of_compare(tmp_path: Path) -> None:
    reference, port = mlp(), mlp(nn.GELU(approximate="tanh"))
    assert assert_same_activations(reference, port, inputs(), tolerance=1e-2).equal
    assert assert_same_activations(reference, port, inputs(), layers=["0"]).equal
    found = failed(reference, port, inputs(), layers="^1$")
    assert found.coverage.compared == 1
    wide = Floor(
        {(str(n), "out", "out"): 1e-2 for n in ("", 1, 2)} | {("2", "in", "args[0]"): 1e-2}, 3
    )
    save(wide, tmp_path / "floor.json")
    assert assert_same_activations(reference, port, inputs(), floor=tmp_path / "floor.json").equal
    renamed = nn.Module()
    renamed.up, renamed.act, renamed.down = nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)
    other = nn.Sequential(*(copy.deepcopy(one) for one in renamed.children())).eval()
    renamed.forward = lambda x: renamed.down(renamed.act(renamed.up(x)))
    rules = {"^0$": "up", "^1$": "act", "^2$": "down"}
    verdict = assert_same_activations(other, renamed.eval(), inputs(), rules=rules)
    assert {row.how for row in verdict.rows if row.module} >= {"rule"}


def test_no_gradients_are_computed_by_default() -> None:
    seen: list[bool] = []

    def run(model: nn.Module) -> Any:
        seen.append(torch.is_grad_enabled())
        return model(inputs())

    assert assert_same_activations(mlp(), mlp(), run).equal
    assert seen == [False, False] and torch.is_grad_enabled()


class Detached(nn.Linear):
    """The right numbers forward, and a branch that gets no gradient."""

    def forward(self, x: Any) -> Any:
        out = super().forward(x)
        return (out - out.detach() * 0.5) + out.detach() * 0.5 - out * 0.5 + out.detach() * 0.5


@pytest.mark.parametrize("needing", [False, True])
def test_gradients_are_compared_and_none_is_left(needing: bool) -> None:
    reference, port = mlp(), mlp()
    port[2].weight.grad = torch.ones(16, 16)
    x = inputs().requires_grad_(needing)
    assert assert_same_activations(reference, port, x, gradients=True).equal
    port[2].__class__ = Detached
    assert assert_same_activations(reference, port, x).equal
    verdict = failed(reference, port, x, gradients=True)
    assert verdict.culprit is not None
    assert verdict.culprit.phase.startswith("grad") and verdict.culprit.module == "2"
    grads = [p.grad for p in (x, *reference.parameters(), *port.parameters()) if p.grad is not None]
    assert len(grads) == 1 and bool((port[2].weight.grad == 1).all())


def test_gradients_of_a_given_function_and_of_nothing() -> None:
    reference, port = mlp(), mlp()
    with torch.inference_mode():  # where the caller is does not matter
        found = assert_same_activations(
            reference, port, inputs(), gradients=lambda out: out.square().sum()
        )
    assert found.equal and any(row.phase == "backward" for row in found.rows)
    frozen = mlp().requires_grad_(False)
    with pytest.raises(TraceError, match="requires a gradient"):
        assert_same_activations(frozen, frozen, inputs(), gradients=True)


def test_traces_of_a_failure_are_kept_where_asked(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    assert assert_same_activations(mlp(), mlp(), inputs(), folder=folder).equal
    assert not folder.exists()
    first = failed(mlp(), mlp(nn.SiLU()), inputs(), folder=folder)
    second = failed(mlp(), mlp(nn.ReLU()), inputs(), folder=folder)
    assert str(folder) in str(first)
    assert Path(first.port) == folder / "port.jsonl" and Path(second.port) != Path(first.port)
    for verdict in (first, second):
        assert compare(verdict.reference, verdict.port).culprit == verdict.culprit
    assert sorted(one.name for one in folder.iterdir()) == ["2", "port.jsonl", "reference.jsonl"]


def test_a_folder_that_cannot_be_written_hides_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    verdict = failed(mlp(), mlp(nn.SiLU()), inputs(), folder=tmp_path / "file" / "kept")
    assert verdict.culprit is not None and verdict.culprit.module == "1"
    assert "could not be kept" in str(verdict)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
def test_coarse_dtypes_are_decided_by_isolating(dtypes: tuple[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    reference = llama().to(dtypes[0])
    port = llama().to(dtypes[1])
    port.set_attn_implementation("sdpa")
    assert assert_same_activations(reference, port, tokens()).equal
    port.model.layers[1].mlp.act_fn = nn.GELU()
    assert failed(reference, port, tokens(), isolate=False).equal is None
    verdict = failed(reference, port, tokens(), folder=tmp_path)
    assert verdict.culprit is not None
    assert verdict.culprit.module == "model.layers.1.mlp.act_fn"
    assert "fed the reference's inputs" in str(verdict)
    assert Path(verdict.reference).is_file() and Path(verdict.port).name == "isolated.jsonl"


def test_isolating_in_any_dtype_if_asked() -> None:
    pytest.importorskip("safetensors")
    port = mlp(nn.GELU(approximate="tanh"))
    assert assert_same_activations(mlp(), mlp(), inputs(), isolate=True).equal
    verdict = failed(mlp(), port, inputs(), isolate=True)
    assert [row.module for row in verdict.rows if row.verdict == "culprit"] == ["1"]
    assert not [row.module for row in verdict.rows if row.verdict == "inherited"]


def test_other_inputs_are_not_isolated_away() -> None:
    reference, port = mlp().bfloat16(), mlp().bfloat16()

    def run(model: nn.Module) -> Any:
        return model(inputs().bfloat16() * (3 if model is port else 1))

    verdict = failed(reference, port, run)
    assert verdict.equal is None and verdict.guards["inputs"].holds is False


def test_inputs_come_in_each_models_dtype() -> None:
    seen: dict[str, torch.Tensor] = {}
    reference, port = mlp(), mlp().bfloat16()
    reference.register_forward_pre_hook(lambda m, a: seen.update(reference=a[0]))
    port.register_forward_pre_hook(lambda m, a: seen.update(port=a[0]))
    assert assert_same_activations(reference, port, inputs() + 1e-4).equal
    assert (seen["reference"].dtype, seen["port"].dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(seen["reference"], seen["port"].float())  # the same values


def test_a_compiled_port() -> None:
    reference, port = mlp(), mlp(nn.SiLU())
    compiled = torch.compile(mlp(), backend="eager", fullgraph=True)
    assert assert_same_activations(reference, compiled, inputs()).equal
    assert blamed(reference, torch.compile(port, backend="eager"), inputs()) == "1"


@pytest.mark.gpu
def test_models_on_different_devices() -> None:
    reference, port = mlp(), mlp().cuda()
    assert assert_same_activations(reference, port, inputs()).equal
    assert blamed(reference, mlp(nn.SiLU()).cuda(), inputs()) == "1"
