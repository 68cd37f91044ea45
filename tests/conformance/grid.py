"""Small cases generated from what a backend declares; each id says what the case is about."""

from collections.abc import Iterator

from polyattn.conformance import Case
from polyattn.masks import LEAVES, Packed
from polyattn.selection.capabilities import Capabilities

# Small, so that a backend's whole grid takes seconds: one tile and a bit of every kernel we know.
PLAIN = Case(seed=20, b=2, t=17, s=33, n=2, k=2, h=24, v=24, poison=True)

# where the numbers of the example that explains the class would hide too little, or nothing
NUMBERS = {
    "Window": (3, 1),
    "Padding": (True, True),
    "BlockMap": (8, 16, True, True),
    "Dense": ("bnts",),
}
PACKED_NUMBERS = NUMBERS | {"Segments": (False, True)}
MASKS = {
    kind.__name__: (kind.__name__, *NUMBERS.get(kind.__name__, ()))
    for kind in LEAVES
    if kind is not Packed
}
STRIDES = {"t": "transposed", "e": "expanded", "s": "strided-last-dim", "o": "cut-out"}
SIZES = {
    "one-query": {"t": 1},
    "one-key": {"s": 1},
    "one-of-everything": {"b": 1, "t": 1, "s": 1, "n": 1, "k": 1},
    "more-queries-than-keys": {"t": 33, "s": 17},
    "a-tile-and-one": {"t": 65, "s": 65},
    "no-batch": {"b": 0},
    "no-queries": {"t": 0},
    "no-keys": {"s": 0},
}
FEATURES = {
    "gqa": ("gqa", {"n": 4, "k": 2}),
    "mqa": ("gqa", {"n": 3, "k": 1}),
    "scale": ("scale", {"scale": 0.7}),
    "scale-zero": ("scale", {"scale": 0.0}),
    "scale-negative": ("scale", {"scale": -0.3}),
    "softcap": ("softcap", {"softcap": 2.0}),
    "sinks": ("sinks", {"sinks": 1}),
    "several-sinks": ("sinks", {"sinks": 3}),
    "narrow-values": ("value_dim", {"v": 8}),
    "wide-values": ("value_dim", {"v": 40}),
    "lse": ("lse", {"lse": True}),
    "backward": ("backward", {"grad": "qkv"}),
    "deterministic": ("deterministic", {"deterministic": True}),
}


def grid(can: Capabilities) -> Iterator[tuple[str, Case]]:
    """Yield (id, case) for each thing that is declared, by itself and with a mask."""
    low, high, step = can.head_dims
    layouts = sorted(can.layouts)
    plain = PLAIN.with_(
        dtype="float32" if "float32" in can.dtypes else sorted(can.dtypes)[0],
        layout="BTNH" if "BTNH" in layouts else layouts[0],
    )
    if can.backward:
        yield "backward-of-keys-alone", plain.with_(grad="k")
    for dtype in sorted(can.dtypes):
        yield f"dtype-{dtype}", plain.with_(dtype=dtype, grad="qkv" if can.backward else "")
    for layout in layouts:
        yield f"layout-{layout}", plain.with_(layout=layout)
    for name, sizes in SIZES.items():
        yield f"size-{name}", plain.with_(**sizes)
    for dim in sorted({low, 8, 40, 7, 80, min(high, 256)}):
        if low <= dim <= high and dim % step == 0:
            yield f"head-dim-{dim}", plain.with_(h=dim, v=dim)
    for name, (declared, asked) in FEATURES.items():
        changes = {k: max(n, low) if k == "v" else n for k, n in asked.items()}
        if getattr(can, declared):
            yield f"feature-{name}", plain.with_(**changes)
            if "Causal" in can.masks:
                yield f"feature-{name}-causal", plain.with_(mask=MASKS["Causal"], s=17, **changes)
    for letter, name in STRIDES.items():
        if letter != "s" or can.strided:
            yield f"strides-{name}", plain.with_(strides=letter * 3)
    yield from _masks(can, plain)
    yield from _biases(can, plain)


def _masks(can: Capabilities, plain: Case) -> Iterator[tuple[str, Case]]:
    plain = plain.with_(grad="qkv" if can.backward else "", lse=can.lse)
    declared = {name: tree for name, tree in MASKS.items() if name in {*can.masks, "Full"}}
    for name, tree in declared.items():
        yield f"mask-{name}", plain.with_(mask=tree)
    if "Causal" in declared and can.masks > {"Causal"}:
        yield "mask-Causal-top-left", plain.with_(mask=("Causal", "top_left"))
        yield "mask-Causal-empty-rows", plain.with_(mask=MASKS["Causal"], t=33, s=17)
    for join in sorted({"And", "Or"} & can.masks):
        for a in sorted(declared):
            for b in sorted(declared):
                if a < b:
                    tree = (join.lower(), declared[a], declared[b])
                    yield f"mask-{a}-{join}-{b}", plain.with_(mask=tree, poison=a == "BlockMap")
    if {"packed"} <= can.layouts and "Packed" in can.masks:
        for kind in LEAVES:
            if kind.packs and kind.__name__ in declared:
                tree = kind.__name__, *PACKED_NUMBERS.get(kind.__name__, ())
                yield f"packed-{tree[0]}", plain.with_(layout="packed", b=4, mask=tree)


def _biases(can: Capabilities, plain: Case) -> Iterator[tuple[str, Case]]:
    trained = "b" if can.bias_grad else ""
    trained += "qkv" if can.backward else ""
    if "DenseBias" in can.biases:
        for dims in ("bnts", "nts", "s", "t", ""):
            bias = ("dense", dims, "own", False)
            yield f"bias-{dims or 'scalar'}", plain.with_(bias=bias, grad=trained)
        yield "bias-with-inf", plain.with_(bias=("dense", "bts", "own", True), lse=can.lse)
        yield "bias-hides-whole-rows", plain.with_(bias=("dense", "t", "own", True), lse=can.lse)
    if "Alibi" in can.biases:
        yield "bias-alibi", plain.with_(bias=("alibi", False, "float32"), grad=trained)
    if can.sinks_grad:
        yield "sinks-trained", plain.with_(sinks=2, grad="sqkv")
