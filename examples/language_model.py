"""Train a small Gemma 2 on the book, let it write, and time it beside the library's own attention.

Gemma 2 caps its scores and looks at a window in every other layer. transformers runs that in eager
attention, scores written out; ``attn_implementation="polyattn"`` runs it in one kernel, forward and
backward.

    python examples/language_model.py --steps 200
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the model is made here; nothing is fetched

ROOT = Path(__file__).resolve().parent.parent
LENGTH, BATCH = 256, 4


def make_model(vocabulary: int) -> Any:
    """Return a Gemma 2 of four layers, for characters, that runs on polyattn."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from polyattn.integrations.transformers import register

    register()
    config = Gemma2Config(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=64,
        query_pre_attn_scalar=32, max_position_embeddings=4096, attn_implementation="polyattn",
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def train(model: Any, text: Any, steps: int) -> list[float]:
    """Train for some steps; return the loss of each."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH,))
        ids = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 20 == 1 or step == steps:
            took = time.perf_counter() - begin
            print(f"step {step} of {steps}: loss {losses[-1]:.3f}, {took:.0f} s", file=sys.stderr)
    return losses


def compare(model: Any, ids: Any, rounds: int = 3) -> dict[str, Any]:
    """Time a long forward with both implementations in turn, and compare what they compute."""
    import torch

    times: dict[str, list[float]] = {"eager": [], "polyattn": []}
    logits: dict[str, Any] = {}
    with torch.inference_mode():
        for turn in range(rounds + 1):  # the first warms up
            for name in times:
                model.set_attn_implementation(name)
                begin = time.perf_counter()
                logits[name] = model(input_ids=ids, use_cache=False).logits
                if turn:
                    times[name].append(time.perf_counter() - begin)
    difference = float((logits["eager"] - logits["polyattn"]).abs().max())
    seconds = {name: statistics.median(took) for name, took in times.items()}
    return {
        "tokens": ids.shape[1],
        "seconds": seconds,
        "ratio": seconds["eager"] / seconds["polyattn"],
        "largest_difference": difference,
        "spread": float(logits["eager"].std()),
    }


def run(steps: int, tokens: int, seed: int) -> dict[str, Any]:
    """Do it all; return what is printed."""
    import torch

    from polyattn import record_selections

    torch.manual_seed(seed)
    book = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md")))
    characters = sorted(set(book))
    text = torch.tensor([characters.index(c) for c in book])
    model = make_model(len(characters))
    losses = train(model, text, steps)
    model.eval()
    with record_selections() as ran, torch.inference_mode():
        start = torch.tensor([[characters.index(c) for c in "A backend "]])
        written = model.generate(input_ids=start, max_new_tokens=200, do_sample=True, top_k=20)
    return {
        "first_loss": losses[0],
        "last_loss": statistics.mean(losses[-5:]),
        "written": "".join(characters[i] for i in written[0].tolist()),
        "ran": sorted({selection.backend for selection in ran}),
        "compared": compare(model, text[None, :tokens]),
    }


def main() -> int:
    """Parse, run, print; 0 when the model learned and both implementations agree, 1 if not."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--steps", type=int, default=200, help="of training")
    made.add_argument("--tokens", type=int, default=2048, help="of the forward that is timed")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true")
    options = made.parse_args()
    found = run(options.steps, options.tokens, options.seed)
    compared = found["compared"]
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"\nloss {found['first_loss']:.2f} -> {found['last_loss']:.2f}")
        print(f"it writes, on {', '.join(found['ran'])}:\n\n{found['written']}\n")
        took = ", ".join(f"{name} {s:.2f} s" for name, s in compared["seconds"].items())
        print(
            f"{compared['tokens']} tokens at once: {took}: polyattn is {compared['ratio']:.2f} x "
            f"as fast; largest difference {compared['largest_difference']:.1e} of logits that "
            f"spread by {compared['spread']:.1f}"
        )
    agreed = compared["largest_difference"] < 1e-3 * max(1.0, compared["spread"])
    return 0 if agreed and found["last_loss"] < found["first_loss"] else 1


if __name__ == "__main__":
    sys.exit(main())
