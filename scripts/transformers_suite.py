"""Run transformers' own tests of models, stock and on polyattn, and compare each test.

``scripts/transformers_suite.py SOURCES`` takes the sources of the installed version: a checkout of
https://github.com/huggingface/transformers, or what PyPI has,

    pip download --no-deps --no-binary :all: transformers==VERSION && tar xzf transformers-*.tar.gz

Of a checkout it runs the tests of the main families (``tests/models/llama/test_modeling_llama.py``)
on the CPU. PyPI's has none of these: there what ``tests/test_modeling_common.py`` asks of every
model is asked of small models. ``--files llama bert`` takes those of these names, transformers'
``model_type``; ``--files generation/test_paged_attention.py`` a file below ``tests``. Ways to run
them:

- ``stock``: transformers alone, what the others are compared with;
- ``interface``: polyattn's attention function and its mask function in the place of "sdpa" (and
  of "paged|sdpa");
- ``routed``: within ``route_sdpa``, where transformers' own "sdpa" calls torch's function.

A test that only polyattn fails, by saying that it cannot (as of ``output_attentions``), is counted
as refused. Exit code: 0 if each other test has the same outcome in all ways, 1 if not, 2 if nothing
ran. It takes the package ``parameterized``, as transformers' tests do.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import re
import sys
import types
import unittest
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diffusers_suite import compare
from torch_suite import Recorder

WAYS = ("stock", "interface", "routed")
MATCH = (
    "(attention or attn or sdpa or matches or batching or training or sliding or hidden_states "
    "or determinism or inputs_embeds or outputs_equivalence) and not flash and not flex"
)
FAMILIES = (
    "llama", "gemma2", "gemma3_text", "gpt_oss", "mistral", "mixtral", "qwen3", "qwen3_moe", "phi3",
    "gpt2", "cohere2", "llama4_text", "bert", "roberta", "modernbert", "vit", "siglip", "clip",
    "t5", "bart", "whisper", "llava", "gemma3", "qwen2_vl",
)  # fmt: skip
HEADS = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM",
         "MASKED_LM", "IMAGE_CLASSIFICATION")  # fmt: skip
ABSENT = {"exporters.test_export": "ExportTesterMixin",
          "generation.test_utils": "GenerationTesterMixin"}  # fmt: skip
"""What the common tests inherit from, and sources from PyPI are without: tests of other things."""


class SmallModel:
    """What transformers' tests ask about the model they test: its configuration and its inputs.

    Anything else that they ask is looked up in the configuration.
    """

    is_training = True

    def __init__(self, name: str) -> None:
        from polyattn.bench.models.transformers_models.building import built

        found = built(name)
        self.config = _without_implementation(found.model.config)
        self.inputs = dict(found.cases["unpadded"][0])
        main = next(iter(self.inputs.values()))
        self.batch_size, self.seq_length = main.shape[0], main.shape[-1]
        if "decoder_input_ids" in self.inputs:  # labels are made as long as `seq_length`
            if "input_ids" in self.inputs:
                self.inputs["decoder_input_ids"] = self.inputs["input_ids"].clone()
            self.seq_length = self.inputs["decoder_input_ids"].shape[1]
        if main.ndim == 4 and isinstance(getattr(self.config, "patch_size", None), int):
            self.mask_length = (main.shape[-1] // self.config.patch_size) ** 2  # of patches
            self.num_masks, self.seq_length = self.mask_length // 2, self.mask_length + 1

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """Return copies of the configuration and of the inputs."""
        return copy.deepcopy(self.config), copy.deepcopy(self.inputs)

    def __getattr__(self, name: str) -> Any:
        if name == "config" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.config, name)


def _without_implementation(config: Any) -> Any:
    """Return the configuration without a choice of attention, as a new one is."""
    config = copy.deepcopy(config)
    waiting = [config]
    while waiting:
        one = waiting.pop()
        one._attn_implementation_internal = None
        waiting += [part for part in vars(one).values() if hasattr(part, "model_type")]
    return config


def classes_of(name: str) -> tuple[Any, ...]:
    """Return the bare model of a family and, where there is one, the first with a head."""
    from polyattn.bench.models.transformers_models.model_classes import class_of

    transformers = importlib.import_module("transformers")
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    bare = class_of(name)
    for head in HEADS:
        named = getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(name)
        if (
            isinstance(named, str)
            and getattr(transformers, named).config_class is bare.config_class
        ):
            return bare, getattr(transformers, named)
    return (bare,)


def tests_of(name: str) -> type:
    """Return transformers' common tests as a class of tests of one family."""
    for module, mixin in ABSENT.items():
        try:
            importlib.import_module(f"tests.{module}")
        except ModuleNotFoundError:
            sys.modules[f"tests.{module}"] = made = types.ModuleType(f"tests.{module}")
            setattr(made, mixin, type(mixin, (), {}))
    common = importlib.import_module("tests.test_modeling_common")
    model, kinds = SmallModel(name), classes_of(name)

    def set_up(self: Any) -> None:
        self.model_tester = model

    held = {
        "setUp": set_up, "all_model_classes": kinds, "is_encoder_decoder":
        bool(getattr(model.config, "is_encoder_decoder", False)),
        "_is_composite": bool(model.config.sub_configs),
        "additional_model_inputs": [x for x in model.inputs if x != kinds[0].main_input_name],
    }  # fmt: skip
    return type("CommonTest", (common.ModelTesterMixin, unittest.TestCase), held)


def own_tests(name: str) -> Path | None:
    """Return the file of a family's own tests, or of that name, in the sources; None without."""
    tests = Path("tests")
    if name.endswith(".py"):
        return tests / name
    from polyattn.bench.models.transformers_models.model_classes import config_class_of

    family = config_class_of(name).__module__.split(".")[-2]
    found = tests / "models" / family / f"test_modeling_{family}.py"
    return found if found.is_file() else None


def run_child(way: str, name: str, match: str, log: Path, done: list[str]) -> int:
    """Run one family's tests in this process, one way, without the tests of `done`."""
    import pytest

    sys.path.insert(0, os.getcwd())
    arguments = ["-q", "--no-header", "-p", "no:cacheprovider", "-k", match]
    file = own_tests(name)
    if file is None:
        file = log.with_name(f"test_{name.replace('-', '_')}.py")
        file.write_text(
            "from transformers_suite import tests_of\n\n"
            f"CommonTest = tests_of({name!r})\nCommonTest.__module__ = __name__\n"
        )
        arguments += ["--rootdir", str(file.parent), "-c", os.devnull]
    arguments.append(str(file))
    arguments += [part for test in done for part in ("--deselect", test)]
    with ExitStack() as around:
        ran = [] if way == "stock" else _on_polyattn(around, way)
        code = pytest.main(arguments, plugins=[Recorder(log)])
    log.with_name("calls").write_text(str(len(ran)))
    return code


def _on_polyattn(around: ExitStack, way: str) -> list[Any]:
    """Put polyattn in the place of "sdpa"; return the list of what it runs."""
    from polyattn import record_selections
    from polyattn.integrations.sdpa_patch import route_sdpa
    from polyattn.integrations.transformers.attention_function import polyattn_attention
    from polyattn.integrations.transformers.library import library
    from polyattn.integrations.transformers.mask_function import polyattn_mask

    if way == "routed":
        around.enter_context(route_sdpa())
    else:
        found = library()
        for name in ("sdpa", "paged|sdpa"):
            found.attention[name], found.masks[name] = polyattn_attention, polyattn_mask
    return around.enter_context(record_selections())


def refused(row: dict[str, Any]) -> bool:
    """Say whether polyattn alone fails a test, and by saying that it cannot."""
    return row["verdict"] == "fails only ours" and "polyattn.errors.Unsupported" in row["ours"][1]


def _require_sources(sources: Path) -> None:
    init = sources / "src" / "transformers" / "__init__.py"
    if not init.is_file() or not (sources / "tests" / "test_modeling_common.py").is_file():
        raise SystemExit(f"got {sources}, expected the unpacked sources of transformers")
    told = re.search(r'^__version__ = "(.+)"', init.read_text(), re.MULTILINE)
    if told is None or told[1] != version("transformers"):
        raise SystemExit(
            f"got the sources of transformers {told and told[1]}, expected those of the installed "
            f"{version('transformers')}"
        )


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("--files", nargs="*", default=FAMILIES, help="model types")
    parser.add_argument("--match", default=MATCH, help="pytest's -k (%(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS[1:]), help="of %(default)s")
    parser.add_argument("--json", type=Path, help="write the differences to this file")
    for hidden in ("--child", "--log", "--done"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        done = json.loads(Path(asked.done).read_text())
        return run_child(asked.child, asked.files[0], asked.match, Path(asked.log), done)
    ways = [way for way in asked.ways.split(",") if way]
    if unknown := [way for way in ways if way not in WAYS[1:]]:
        parser.error(f"got --ways {unknown[0]}, expected some of {', '.join(WAYS[1:])}")
    _require_sources(asked.sources)
    names = [Path(name) for name in asked.files]
    tests, apart = compare(__file__, asked.sources.resolve(), names, ways, asked.match)
    if asked.json:
        asked.json.write_text(json.dumps(apart, indent=1))
    others = [row for row in apart if not refused(row)]
    print(f"{tests} tests, {len(others)} differences, {len(apart) - len(others)} refused")
    return 2 if not tests else int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
