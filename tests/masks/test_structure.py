"""The structure of a mask is what its printed form says, for every mask there is."""

import numpy as np
import pytest

from polyattn import (
    Alibi,
    BlockMap,
    Causal,
    Chunked,
    Dense,
    DenseBias,
    Dilated,
    FirstKeys,
    Full,
    LeftPadding,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.structure import Structure, structure_of
from polyattn.problem import MaskFacts, Problem
from polyattn.selection.registry import registry

LEAVES = [
    Full(), Causal(), Causal("top_left"), Window(left=3), Window(right=0, left=9), PrefixLM([1, 2]),
    Padding(kv_lengths=[1, 2]), Padding([1], [2]), Packed([0, 2, 5]), Segments([0, 0, 1]),
    Segments(np.zeros((2, 3), int), np.zeros((2, 4), int)), Dense([[True, False]]),
    Dense(np.ones((2, 1, 3, 4), bool)), Dense(np.array(True)),
    LeftPadding([1, 2]), LeftPadding(None, [1]), Chunked(8192), Dilated(3), FirstKeys(0),
    BlockMap(64, 128, np.zeros((1, 1, 2, 3), int), np.zeros((1, 1, 2), int)),
]  # fmt: skip


def printed(found):
    """Write a structure as the masks print themselves."""
    if found.kind == "Not":
        (part,) = found.parts
        return f"~({printed(part)})" if part.kind in ("And", "Or") else f"~{printed(part)}"
    if found.parts:
        sign = {"And": " & ", "Or": " | "}[found.kind]
        both = ("And", "Or")
        return sign.join(f"({printed(p)})" if p.kind in both else printed(p) for p in found.parts)
    sizes = lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else repr(x)  # noqa: E731
    written = [sizes(x) for x in found.arguments]
    return (
        f"{found.kind}({', '.join(written + [f'{k}={sizes(v)}' for k, v in found.named.items()])})"
    )


@pytest.mark.parametrize("mask", LEAVES, ids=str)
def test_each_leaf(mask):
    found = structure_of(mask.signature)
    assert printed(found) == mask.signature
    assert found.kind == type(mask).__name__ and not found.parts
    assert MaskFacts.parse(mask.signature, mask.align) == MaskFacts.of(mask)


def test_joined_masks_in_any_depth():
    rng = np.random.default_rng(0)
    masks = [mask for mask in LEAVES if mask.align != "top_left"]
    for _ in range(300):
        one, two, three = (masks[i] for i in rng.integers(len(masks), size=3))
        for mask in (
            one & two & three,
            (one | two) & three,
            one | (two & three),
            one & (two | one),
            *(() if "Packed" in (one & two & three).kinds else (~one, ~(one & ~two) | ~three)),
        ):
            assert printed(structure_of(mask.signature)) == mask.signature
            assert MaskFacts.parse(mask.signature, mask.align) == MaskFacts.of(mask)
            leaves = [leaf.kind for leaf in structure_of(mask.signature).leaves()]
            assert leaves == [type(leaf).__name__ for leaf in mask.leaves()]


def test_biases():
    assert structure_of(Alibi(np.ones(8, "f4")).signature) == Structure("Alibi", (8, "float32"))
    for shape in ((), (3,), (1, 2, 3, 4)):
        found = structure_of(DenseBias(np.ones(shape, "f2")).signature)
        sizes = shape[0] if len(shape) == 1 else shape
        assert found == Structure("DenseBias", (sizes, "float16"))


def test_a_lone_causal_mask():
    both, top, bottom = None, "top_left", "bottom_right"
    for mask, true in (
        (Causal(), {both, bottom}),
        (Causal("top_left"), {both, top}),
        (Causal() & Window(left=1), set()),
        (Full(), set()),
    ):
        facts = MaskFacts.parse(mask.signature, None)
        assert {align for align in (both, top, bottom) if facts.is_causal(align)} == true


@pytest.mark.parametrize(
    "text", ["", "Causal", "1 + 2", "Causal() + Full()", "f(g())", "(" * 300, "Causal() &", "a.b()"]
)
def test_what_is_no_signature(text):
    with pytest.raises(ValueError, match="expected the signature of a mask or bias"):
        structure_of(text)


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cudnn"])
def test_a_bias_of_another_half_type_is_refused(name):
    """Their names hold each other: "float16" is in "bfloat16"."""
    problem = Problem(
        batch=1,
        q_len=16,
        kv_len=16,
        heads=2,
        kv_heads=2,
        head_dim=64,
        dtype="float16",
        device="cuda:sm_90",
        bias="DenseBias(1x2x16x16, bfloat16)",
    )
    check = registry["torch", name].check
    assert [reason.fact for reason in check(problem)] == ["bias"]
    assert not check(problem.with_(bias="DenseBias(1x2x16x16, float16)"))
