"""Train a ViT on handwritten digits: an unchanged torch program, routed through polyattn.

The model calls torch's own attention function. Within ``route_sdpa()`` every such call runs on the
best kernel of the machine, and a listener hears which, and why.

    python examples/image_model.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any


def make_model() -> Any:
    """Return a ViT that sees an 8 x 8 picture as 64 patches of one pixel."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        image_size=8, patch_size=1, num_channels=1, num_labels=10, attn_implementation="sdpa",
        initializer_range=0.08,
    )  # fmt: skip
    return ViTForImageClassification(config)


def train(model: Any, pictures: Any, digits: Any, steps: int) -> float:
    """Train for some steps; return the last loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    begin, last = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        chosen = torch.randint(len(pictures), (64,))
        loss = model(pixel_values=pictures[chosen], labels=digits[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss.detach())
        if step % 50 == 1 or step == steps:
            took = time.perf_counter() - begin
            print(f"step {step} of {steps}: loss {last:.3f}, {took:.0f} s", file=sys.stderr)
    return last


def run(steps: int, seed: int) -> dict[str, Any]:
    """Do it all; return what is printed."""
    import torch
    from sklearn.datasets import load_digits

    from polyattn.integrations.recording import Recorder
    from polyattn.integrations.sdpa_patch import route_sdpa

    torch.manual_seed(seed)
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    digits = torch.tensor(data.target)
    held_back = len(pictures) // 5
    model = make_model()
    recorder = Recorder()
    with route_sdpa(recorder):
        loss = train(model, pictures[held_back:], digits[held_back:], steps)
        with torch.inference_mode():
            seen = model.eval()(pixel_values=pictures[:held_back]).logits.argmax(-1)
    ran: Counter[str] = Counter()
    for case in recorder.record().cases:
        for how, calls in case.ran.items():
            ran[f"{how.backend}: {how.reason}"] += calls
    right = float((seen == digits[:held_back]).float().mean())
    return {
        "steps": steps,
        "loss": loss,
        "accuracy": right,
        "held_back": held_back,
        "ran": dict(ran),
    }


def main() -> int:
    """Parse, run, print; 0 when most digits that it never saw are told right, 1 if not."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--steps", type=int, default=200, help="of training")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true")
    options = made.parse_args()
    found = run(options.steps, options.seed)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(
            f"{found['accuracy']:.1%} of {found['held_back']} digits that it never saw, "
            f"after {found['steps']} steps"
        )
        for reason, calls in found["ran"].items():
            print(f"{calls} attention calls on {reason}")
    return 0 if found["accuracy"] > 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
