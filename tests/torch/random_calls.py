"""Random calls of attention, right and wrong, for the tests that send them through every door."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyattn import (
    Alibi,
    BlockMap,
    Causal,
    Chunked,
    Dense,
    DenseBias,
    Dilated,
    FirstKeys,
    LeftPadding,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)

__all__ = ["Call", "draw"]


@dataclass
class Call:
    """The arguments of one call, and what was made wrong of them on purpose, if anything."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any] = field(default_factory=dict)
    wrong: str = ""

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(getattr(x, "shape", (x,)))) for x in (self.q, self.k, self.v))
        return f"{shapes} {getattr(self.q, 'dtype', '')} {self.options} wrong={self.wrong!r}"


def draw(rng: random.Random) -> Call:
    """Draw a call; two of five are wrong in one place."""
    packed = rng.random() < 0.15
    layout = "packed" if packed else rng.choice(["BTNH", "BNTH"])
    b, group, kv_heads = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 3])
    t, s = rng.choice([1, 2, 5, 8, 17]), rng.choice([1, 3, 5, 8, 17])
    t = s if rng.random() < 0.5 else t
    h = rng.choice([4, 8, 16])
    value_dim = h if rng.random() < 0.8 else rng.choice([1, 4, 12])
    dtype = rng.choice([torch.float32] * 5 + [torch.bfloat16, torch.float16, torch.float64])
    sizes = {"b": b, "t": t, "s": s, "n": group * kv_heads, "k": kv_heads}

    def array(length: int, heads: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        x = torch.randn(b, length, heads, width, generator=generator).to(dtype)
        if packed:
            return x.flatten(0, 1)
        return x.transpose(1, 2).contiguous() if layout == "BNTH" else x

    call = Call(
        array(t, sizes["n"], h),
        array(s, kv_heads, h),
        array(s, kv_heads, value_dim),
        {"layout": layout} if layout != "BTNH" or rng.random() < 0.5 else {},
    )
    _add_options(call, sizes, packed, rng)
    if rng.random() < 0.4:
        _spoil(call, sizes, packed, rng)
    return call


def _add_options(call: Call, d: dict[str, int], packed: bool, rng: random.Random) -> None:
    mask = _mask(d, packed, rng)
    if mask is not None:
        call.options["mask"] = mask
    if rng.random() < 0.2 and not packed:
        shape = [rng.choice([1, d["b"]]), rng.choice([1, d["n"]]), rng.choice([1, d["t"]]), d["s"]]
        call.options["bias"] = (
            DenseBias(torch.randn(shape[rng.choice([0, 0, 1, 2]) :]))
            if rng.random() < 0.7
            else Alibi(torch.rand(d["n"]))
        )
    if rng.random() < 0.2:
        call.options["scale"] = rng.choice([0.5, 1, 0.0, -0.25])
    if rng.random() < 0.15:
        call.options["softcap"] = rng.choice([0.5, 3.0, 20])
    if rng.random() < 0.15:
        call.options["sinks"] = torch.randn((d["n"],) if rng.random() < 0.6 else (d["n"], 2))
    if rng.random() < 0.2:
        call.options["return_lse"] = True


def _mask(d: dict[str, int], packed: bool, rng: random.Random) -> Any:
    b, n, t, s = d["b"], d["n"], d["t"], d["s"]
    of = {
        "Causal": lambda: Causal(rng.choice(["bottom_right", "top_left"])),
        "Window": lambda: Window(rng.choice([None, 0, 2]), rng.choice([None, 1, 40])),
        "Padding": lambda: Padding(kv_lengths=torch.randint(0, s + 1, (b,))),
        "Rows": lambda: Padding(q_lengths=[rng.randint(0, t) for _ in range(b)]),
        "LeftPadding": lambda: LeftPadding(
            [rng.randint(0, t) for _ in range(b)] if rng.random() < 0.3 else None,
            torch.randint(0, s + 1, (b,)),
        ),
        "Chunked": lambda: Chunked(rng.choice([1, 3, 8])),
        "Dilated": lambda: Dilated(rng.choice([1, 2, 5])),
        "FirstKeys": lambda: FirstKeys(rng.choice([0, 2, 40])),
        "PrefixLM": lambda: PrefixLM(torch.randint(0, s + 1, (b,))),
        "Segments": lambda: Segments(torch.randint(0, 2, (b, t)), torch.randint(0, 2, (b, s))),
        "Dense": lambda: Dense(torch.rand(rng.choice([1, b]), rng.choice([1, n]), t, s) > 0.3),
        "BlockMap": lambda: BlockMap(
            4, 4, torch.zeros(1, 1, -(-t // 4), 1).int(), torch.ones(1, 1, -(-t // 4)).int()
        ),
    }
    if packed:
        lengths = torch.arange(b + 1, dtype=torch.int32)
        parts: list[Any] = [Packed(lengths * t, lengths * s)]
        if rng.random() < 0.5:
            parts.append(rng.choice([Causal(), Window(2, 0), Chunked(2), ~FirstKeys(1)]))
        return parts[0] if len(parts) == 1 else parts[0] & parts[1]
    if rng.random() < 0.4:
        return None
    first, second = (of[rng.choice(list(of))]() for _ in range(2))
    first = ~first if rng.random() < 0.15 else first
    if rng.random() < 0.7 or {first.align, second.align} >= {"top_left", "bottom_right"}:
        return first
    return first & second if rng.random() < 0.6 else first | second


def _spoil(call: Call, d: dict[str, int], packed: bool, rng: random.Random) -> None:
    """Make one argument wrong."""
    b, n, t, s = d["b"], d["n"], d["t"], d["s"]
    options = call.options
    raw = torch.ones(t, s, dtype=torch.bool)
    nine = torch.zeros(1, 1, 9, 1).int(), torch.ones(1, 1, 9).int()
    ways: dict[str, Any] = {
        "sinks of another length": ("sinks", torch.zeros(n + 1)),
        "sinks of one value": ("sinks", torch.zeros(1 if n > 1 else 2)),
        "sinks of integers": ("sinks", torch.zeros(n).long()),
        "sinks of three dims": ("sinks", torch.zeros(n, 1, 1)),
        "sinks elsewhere": ("sinks", torch.zeros(n, device="meta")),
        "a list of sinks": ("sinks", [0.0] * n),
        "scale nan": ("scale", math.nan),
        "scale inf": ("scale", math.inf),
        "scale text": ("scale", "1"),
        "scale bool": ("scale", True),
        "softcap inf": ("softcap", math.inf),
        "softcap 0": ("softcap", 0),
        "softcap -1": ("softcap", -1.0),
        "layout": ("layout", "NTBH"),
        "layout None": ("layout", None),
        "raw mask": ("mask", raw),
        "text mask": ("mask", "causal"),
        "raw bias": ("bias", torch.zeros(t, s)),
        "bias elsewhere": ("bias", DenseBias(torch.zeros(t, s, device="meta"))),
        "bias too wide": ("bias", DenseBias(torch.zeros(t, s + 1))),
        "slopes": ("bias", Alibi(torch.zeros(n + 1))),
        "dense mask too wide": ("mask", Dense(torch.ones(t, s + 1, dtype=torch.bool))),
        "dense mask of another batch": ("mask", Dense(torch.ones(b + 1, 1, t, s).bool())),
        "padding of another batch": ("mask", Padding(kv_lengths=torch.ones(b + 1).int())),
        "starts of another batch": ("mask", ~LeftPadding(q_starts=torch.ones(b + 2).int())),
        "prefix of another batch": ("mask", Causal() & PrefixLM(torch.ones(b + 3).int())),
        "segments": ("mask", Segments(torch.zeros(t + 1).int(), torch.zeros(s).int())),
        "blocks": ("mask", BlockMap(4, 4, *nine)),
        "packed under an or": ("mask", Causal() & (Packed(torch.tensor([0, t])) | Window(1))),
        "packed or not": ("mask", None if packed else Packed(torch.tensor([0, t]))),
    }  # fmt: skip
    inputs = {
        "key of another head dim": ("k", lambda x: x[..., :-1]),
        "value of fewer keys": ("v", lambda x: x[..., : x.shape[-2] - 1, :]),
        "query of fewer dims": ("q", lambda x: x[0]),
        "key of another dtype": ("k", lambda x: x.float() if x.dtype.itemsize == 8 else x.double()),
        "integers": ("q", lambda x: x.long()),
        "no value": ("v", lambda x: None),
        "no head dim": ("q", lambda x: x[..., :0]),
        "sparse": ("q", lambda x: x.to_sparse()),
    }  # fmt: skip
    call.wrong = rng.choice([*ways, *inputs])
    if call.wrong in ways:
        name, value = ways[call.wrong]
        options[name] = value
    else:
        name, change = inputs[call.wrong]
        setattr(call, name, change(getattr(call, name)))
