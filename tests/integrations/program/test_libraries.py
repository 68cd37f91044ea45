"""What is done when a program imports a library with attention of its own."""

import sys

import pytest

pytest.importorskip("torch")

from polyattn.errors import Unsupported
from polyattn.integrations import program as _program
from polyattn.integrations.program.libraries import is_flex_routed, register
from polyattn.integrations.program.recorder import Recorder
from tests.integrations.program.programs import reported

HINT = "attn_implementation='polyattn' routes it"
MODELS = """
import torch, transformers

def model(kind, name, **changes):
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=50, bos_token_id=0, eos_token_id=1, **changes,
    )
    config = getattr(transformers, kind + "Config")(**sizes)
    config._attn_implementation = name
    return getattr(transformers, kind + "Model")(config).eval()

ids = torch.zeros(1, 6, dtype=torch.long)
"""


def left(report):
    """Return the calls that came to no backend, by the first part of the reason."""
    return {one["reason"].partition(";")[0]: one["calls"] for one in report["left_to_torch"]}


@pytest.mark.slow
class TestTransformers:
    @pytest.fixture(autouse=True)
    def _is_there(self):
        pytest.importorskip("transformers")

    def test_what_models_compute_by_themselves_is_counted(self, tmp_path):
        text = f"""{MODELS}
with torch.no_grad():
    model("Llama", "sdpa")(ids)
    for _ in range(3):
        model("Llama", "eager")(ids)
    model("Mistral", "eager")(ids)
    compiled = torch.compile(model("Llama", "eager"), backend="eager")
    compiled(ids)
sizes = dict(n_embd=32, n_layer=1, n_head=2, rotary_dim=4, vocab_size=50, bos_token_id=0,
             eos_token_id=1)
for _ in range(2):
    transformers.GPTJModel(transformers.GPTJConfig(**sizes))(ids)
transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
"""
        report = reported(tmp_path, text)
        assert left(report) == {
            "transformers' eager attention of llama": 6,
            "transformers' eager attention of mistral": 2,
        }
        assert sum(one["calls"] for one in report["classes"]) == 2
        (unseen,) = report["unseen"]
        assert (unseen["what"], unseen["times"]) == ("GPTJModel", 2)
        assert "GPTJAttention is attention written out" in unseen["why"]

    def test_a_tokenizer_alone_imports_no_models(self, tmp_path):
        text = """
import sys, transformers
transformers.PreTrainedTokenizerBase
assert "transformers.modeling_utils" not in sys.modules
"""
        assert reported(tmp_path, text)["calls"] == 0


@pytest.mark.slow
def test_diffusers_own_backends_are_counted(tmp_path):
    pytest.importorskip("diffusers")
    text = """
import torch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
q = torch.randn(1, 16, 2, 8)
dispatch_attention_fn(q, q, q)
dispatch_attention_fn(q, q, q, backend="_native_math")
dispatch_attention_fn(q, q, q, backend="flex")
with attention_backend("flex"):
    dispatch_attention_fn(q, q, q)
"""
    report = reported(tmp_path, text)
    mine = left(report).get("diffusers' attention backend 'flex'", 0)
    assert mine == (0 if is_flex_routed() else 2)  # each call is counted once
    assert report["calls"] == 4


class TestRegister:
    """Our implementations for libraries are found by their place, and registered once."""

    @pytest.fixture
    def place(self, tmp_path, monkeypatch):
        """A folder in which modules are those of `polyattn.integrations`."""
        package = sys.modules["polyattn.integrations"]
        assert _program.__name__ == "polyattn.integrations.program"
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        yield tmp_path
        sys.modules.pop("polyattn.integrations.a_library", None)

    def test_one_that_is_not_there(self, place):
        recorder = Recorder()
        assert not register("a_library", recorder)
        assert recorder.record().unseen == []

    def test_one_that_is_there(self, place):
        (place / "a_library.py").write_text("calls = []\ndef register():\n    calls.append(1)\n")
        assert register("a_library", Recorder())
        assert sys.modules["polyattn.integrations.a_library"].calls == [1]

    def test_one_that_refuses_is_said(self, place):
        (place / "a_library.py").write_text(
            "from polyattn.errors import Unsupported\n"
            "def register():\n    raise Unsupported('got version 9, expected 5')\n"
        )
        recorder = Recorder()
        assert not register("a_library", recorder)
        (one,) = recorder.record().unseen
        assert "got version 9, expected 5" in one.why

    def test_one_that_is_broken_is_not_hidden(self, place):
        (place / "a_library.py").write_text("def register():\n    raise ZeroDivisionError\n")
        with pytest.raises(ZeroDivisionError):
            register("a_library", Recorder())
        assert issubclass(Unsupported, Exception)
