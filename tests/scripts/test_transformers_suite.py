"""scripts/transformers_suite.py makes small models that transformers' own tests can be asked of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("transformers_suite")


@pytest.mark.parametrize("name", ["t5", "vit", "clip"])
def test_small_models_choose_no_attention_and_run(suite: Any, name: str) -> None:
    model, kinds = suite.SmallModel(name), suite.classes_of(name)
    config, inputs = model.prepare_config_and_inputs_for_common()
    parts = [config, *(x for x in vars(config).values() if hasattr(x, "model_type"))]
    assert [one._attn_implementation for one in parts] == [None] * len(parts)
    for kind in kinds:
        made = kind(config)
        assert made.config._attn_implementation == "sdpa"
        made(**inputs)
    assert kinds[0].main_input_name in inputs and model.model_type == name


def test_what_polyattn_says_it_cannot_is_no_difference(suite: Any) -> None:
    said = "polyattn.errors.Unsupported: got output_attentions=True"
    row = {"verdict": "fails only ours", "ours": ("failed", said)}
    assert suite.refused(row)
    assert not suite.refused(row | {"ours": ("failed", "AssertionError: 1e-3")})
    assert not suite.refused(row | {"verdict": "differs"})


def test_tests_of_a_checkout_come_before_those_that_are_made(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert suite.own_tests("gemma3_text") is None
    file = Path("tests", "models", "gemma3", "test_modeling_gemma3.py")
    file.parent.mkdir(parents=True)
    file.touch()
    assert suite.own_tests("gemma3_text") == suite.own_tests("gemma3") == file
    named = "generation/test_paged_attention.py"
    assert suite.own_tests(named) == Path("tests", named)


def test_other_versions_are_turned_away(tmp_path: Path) -> None:
    init = tmp_path / "src" / "transformers" / "__init__.py"
    init.parent.mkdir(parents=True)
    init.write_text('__version__ = "4.0.0"\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_modeling_common.py").touch()
    command = [sys.executable, str(SCRIPTS / "transformers_suite.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "sources of transformers 4.0.0" in ended.stderr
