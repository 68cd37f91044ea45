"""What transformers' own mask functions mean is what the masks made of them mean."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from transformers import masking_utils as theirs

from polyattn.errors import InvalidProblem
from polyattn.integrations.transformers.mask_function import polyattn_mask
from polyattn.integrations.transformers.mask_value import AttentionMaskValue

B = 2


def agree(**call: Any) -> AttentionMaskValue:
    """Make the mask both ways, compare, and return ours."""
    ours = polyattn_mask(batch_size=B, **call)
    stock = theirs.sdpa_mask(
        batch_size=B, **call | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    assert isinstance(ours, AttentionMaskValue), ours
    assert tuple(ours.shape) == (B, 1, call["q_length"], call["kv_length"])
    assert torch.equal(ours.dense(), stock.expand(B, 1, -1, -1)), (ours, call)
    return ours


PADDINGS = {
    "none": lambda n: None,
    "all real": lambda n: torch.ones(B, n, dtype=torch.bool),
    "left": lambda n: torch.arange(n) >= torch.tensor([[2], [0]]),
    "right": lambda n: torch.arange(n) < torch.tensor([[n - 3], [n]]),
    "both sides": lambda n: (
        (torch.arange(n) >= 1) & (torch.arange(n) < torch.tensor([[n - 1], [n]]))
    ),
    "holes": lambda n: torch.arange(n) % torch.tensor([[3], [n + 1]]) != 1,
    "nothing": lambda n: torch.arange(n) >= torch.tensor([[n], [1]]),
}

# queries, keys, q_offset, kv_offset: a prompt, a growing cache, a sliding one that is full, a cache
# of fixed length at its begin and in the middle, one query
PLACES = {
    "prompt": (9, 9, 0, 0), "continued": (3, 9, 6, 0), "sliding": (3, 7, 11, 7),
    "fixed": (4, 12, 0, 0), "fixed, continued": (3, 12, 5, 0), "one": (1, 9, 8, 0),
    "one of fixed": (1, 12, 5, 0), "one of sliding": (1, 5, 11, 7),
}  # fmt: skip


def functions(places: tuple[int, int, int, int]) -> dict[str, Any]:
    skipped = torch.tensor([2, 0])
    end = places[3] + places[1]
    ids = torch.tensor([[-1, 0, 0, -1, 1, 1, 1, -1, 2, -1, 2, 2, 0] * 2] * B)[:, :end]
    blocks = theirs.blockwise_overlay(ids)
    return {
        "causal": theirs.causal_mask_function,
        "window": theirs.sliding_window_causal_mask_function(3),
        "chunks": theirs.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.long)),
        "chunks after padding": theirs.chunked_causal_mask_function(4, skipped),
        "everything": theirs.bidirectional_mask_function,
        "blocks": theirs.or_masks(theirs.causal_mask_function, blocks),
        "blocks and window": theirs.or_masks(theirs.sliding_window_causal_mask_function(3), blocks),
    }


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("may_skip", [True, False])
def test_masks_of_every_place_and_padding(place: str, padding: str, may_skip: bool) -> None:
    places = PLACES[place]
    queries, keys, q_offset, kv_offset = places
    seen = min(q_offset + queries, kv_offset + keys)
    for name, function in functions(places).items():
        if "after padding" in name and padding != "left":
            continue  # its numbers are those of this padding
        if name == "chunks" and padding in ("left", "both sides", "nothing", "holes"):
            continue  # a caller counts the padding before
        call: dict[str, Any] = {
            "q_length": queries, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset,
            "mask_function": function, "attention_mask": PADDINGS[padding](seen),
            "allow_is_causal_skip": may_skip,
        }  # fmt: skip
        made = polyattn_mask(batch_size=B, **call)
        stock = theirs.sdpa_mask(batch_size=B, **call | {"allow_is_causal_skip": False})
        dense = made.dense() if isinstance(made, AttentionMaskValue) else made
        assert torch.equal(dense, stock.expand(B, 1, -1, -1)), (name, made)


def test_what_is_written_as_which_mask() -> None:
    one = {"q_length": 8, "kv_length": 8}
    window = theirs.sliding_window_causal_mask_function(3)
    chunks = theirs.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.long))
    both = theirs.sliding_window_bidirectional_mask_function(3)
    left, right = PADDINGS["left"](8), PADDINGS["right"](8)
    shown = {
        "Causal()": agree(**one),
        "Window(left=2, right=None) & Causal()": agree(**one, mask_function=window),
        "Chunked(4) & Causal()": agree(**one, mask_function=chunks),
        "Window(left=3, right=3)": agree(**one, mask_function=both),
        "Causal() & LeftPadding(q=None, kv=2)": agree(**one, attention_mask=left),
        "Causal() & Padding(q=None, kv=2)": agree(**one, attention_mask=right),
        "Causal() & Dense(2x1x1x8)": agree(**one, attention_mask=PADDINGS["holes"](8)),
        "Full()": agree(**one, mask_function=theirs.bidirectional_mask_function),
    }
    for text, value in shown.items():
        assert repr(value.mask) == text


def test_nothing_to_hide_is_no_mask_where_the_caller_allows_that() -> None:
    call = {"batch_size": B, "q_length": 4, "kv_length": 6,
            "mask_function": theirs.bidirectional_mask_function}  # fmt: skip
    assert polyattn_mask(**call, allow_is_bidirectional_skip=True) is None
    ones = torch.ones(B, 6, dtype=torch.bool)
    assert polyattn_mask(**call, allow_is_bidirectional_skip=True, attention_mask=ones) is None
    assert polyattn_mask(**call) is not None


def test_packed_rows_are_segments_and_positions_within_them() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0], list(range(10))])
    packed = theirs.find_packed_sequence_indices(positions)
    inner = {
        "Segments(q=2x10, kv=2x10) & Causal()": theirs.causal_mask_function,
        "Segments(q=2x10, kv=2x10) & Window(left=1, right=None) & Causal()":
            theirs.sliding_window_causal_mask_function(2),
        "Segments(q=2x10, kv=2x10) & Segments(q=2x10, kv=2x10) & Causal()":
            theirs.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.long)),
    }  # fmt: skip
    for text, function in inner.items():
        joined = theirs.packed_sequence_compatibility_function(function, positions, packed)
        value = agree(q_length=10, kv_length=10, mask_function=joined)
        assert repr(value.mask) == text


def test_a_function_of_the_caller_is_evaluated() -> None:
    def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + k) % 2 == 0

    for join in (theirs.or_masks, theirs.and_masks):
        joined = join(theirs.causal_mask_function, odd)
        call = {"q_length": 5, "kv_length": 5, "mask_function": joined, "use_vmap": True}
        made = polyattn_mask(batch_size=B, **call)
        assert isinstance(made, torch.Tensor) and made.dtype == torch.bool
        assert torch.equal(made, theirs.sdpa_mask(batch_size=B, **call, allow_is_causal_skip=False))


@pytest.mark.parametrize("place", ["prompt", "one", "fixed"])
def test_a_padding_mask_of_more_rows_than_the_batch_is_read_as_the_library_reads_it(
    place: str,
) -> None:
    queries, keys, q_offset, kv_offset = PLACES[place]
    rows = torch.arange(keys) >= torch.tensor([[2], [0], [4]])
    agree(
        q_length=queries, kv_length=keys, q_offset=q_offset, kv_offset=kv_offset,
        attention_mask=rows,
    )  # fmt: skip


def test_a_padding_mask_of_too_few_rows_says_how_many_there_must_be() -> None:
    rows = torch.arange(9) >= torch.tensor([[2], [0]])
    with pytest.raises(
        InvalidProblem, match=r"got an attention_mask of \(2, 9\).* expected 5 rows"
    ):
        polyattn_mask(5, 9, 9, attention_mask=rows)


def test_a_closure_is_known_by_its_code_and_not_by_its_name() -> None:
    def causal_mask_function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= q

    made = polyattn_mask(B, 4, 4, mask_function=causal_mask_function)
    dense = made.dense() if isinstance(made, AttentionMaskValue) else made
    assert dense[0, 0].tolist() == torch.ones(4, 4).triu().bool().tolist()


def test_a_cache_of_fixed_length_is_told_by_two_lengths_whose_values_are_not_read() -> None:
    place = torch.tensor(5)
    for window in (None, 3):
        function = theirs.causal_mask_function
        if window is not None:
            function = theirs.sliding_window_causal_mask_function(window)
        value = agree(q_length=1, kv_length=12, q_offset=place, mask_function=function)
        assert repr(value.mask) == "LeftPadding(q=None, kv=2) & Padding(q=None, kv=2)"
        assert value.limit == 12  # the arrays change from step to step, and nothing else
    value = agree(q_length=4, kv_length=12, q_offset=place)
    assert repr(value.mask) == "Causal()" and value.limit == 9


def test_a_mask_that_was_made_before_is_handed_back() -> None:
    value = polyattn_mask(B, 4, 4)
    assert polyattn_mask(B, 4, 4, attention_mask=value) is value


def test_random_compositions() -> None:
    rng = random.Random(5)
    for _ in range(300):
        queries = rng.randint(1, 6)
        keys = queries + rng.randint(0, 6)
        kv_offset = rng.choice((0, 0, 0, 3))
        q_offset = kv_offset + rng.choice((0, keys - queries, rng.randint(0, keys - queries)))
        if kv_offset and q_offset == kv_offset and keys > queries:
            continue
        end = kv_offset + keys
        ids = torch.tensor([[rng.randint(-1, 2) for _ in range(end)] for _ in range(B)])
        made = {
            "window": theirs.sliding_window_overlay(rng.randint(1, 5)),
            "causal": theirs.causal_mask_function,
            "blocks": theirs.blockwise_overlay(ids),
            "both": theirs.sliding_window_bidirectional_overlay(rng.randint(1, 4)),
            "chunks": theirs.chunked_overlay(rng.randint(1, 5), torch.tensor([0, 0])),
            "packed": theirs.packed_sequence_mask_function(ids.clamp(min=0)),
            "everything": theirs.bidirectional_mask_function,
        }
        function = rng.choice(list(made.values()))
        for other in rng.sample(list(made.values()), rng.randint(0, 3)):
            function = rng.choice((theirs.and_masks, theirs.or_masks))(function, other)
        padding = rng.choice([name for name in PADDINGS if name != "nothing"])
        call: dict[str, Any] = {
            "q_length": queries, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset,
            "mask_function": function, "attention_mask": None,
        }  # fmt: skip
        if padding in ("none", "right", "all real"):
            call["attention_mask"] = PADDINGS[padding](max(q_offset + queries, 4))
        ours = polyattn_mask(batch_size=B, **call)
        stock = theirs.sdpa_mask(batch_size=B, **call, allow_is_causal_skip=False)
        dense = ours.dense() if isinstance(ours, AttentionMaskValue) else ours
        assert torch.equal(dense, stock.expand(B, 1, -1, -1)), (ours, call)


def test_models_find_a_tensor_where_they_look_for_one() -> None:
    for value in (polyattn_mask(B, 4, 6, q_offset=2), polyattn_mask(B, 4, 4)):
        dense = value.dense()
        scores = torch.randn(B, 3, *dense.shape[2:])
        least = torch.finfo(torch.float32).min
        assert value.ndim == value.dim() == 4 and value.dtype == torch.bool
        assert value.size() == dense.shape and value.size(-1) == dense.shape[-1]
        assert torch.equal(~value, ~dense) and torch.equal(value & dense, dense)
        assert torch.equal(dense | value, dense) and torch.equal(value == 0, ~dense)
        assert torch.equal(torch.where(value, scores, 0.0), torch.where(dense, scores, 0.0))
        assert torch.equal(scores + value, scores + torch.where(dense, 0.0, least))
        assert torch.equal(value.sum(-1), dense.sum(-1)) and value.numel() == dense.numel()
        assert torch.equal(scores.masked_fill(~value, least), scores.masked_fill(~dense, least))
        assert torch.equal(value[:, 0], dense[:, 0])
        assert torch.equal(value[0, 0, -1], dense[0, 0, -1])
        assert torch.equal(value.to(torch.float32), dense.float())


def test_slices_that_keep_whole_rows_keep_the_value() -> None:
    value = polyattn_mask(B, 4, 6, q_offset=2, attention_mask=PADDINGS["left"](6))
    assert value[:, :, :, :6] is value and value[..., :9] is value and value[:] is value
    for first in range(1, 4):
        kept = value[:, :, -first:, :]
        assert isinstance(kept, AttentionMaskValue)
        assert torch.equal(kept.dense(), value.dense()[:, :, -first:])
    assert torch.equal(value[:, :, :2], value.dense()[:, :, :2])  # those are not the last ones
    fixed = polyattn_mask(B, 4, 12)
    assert fixed.limit == 4 and fixed[..., :7].shape[-1] == 7
    assert torch.equal(fixed[..., :7].dense(), fixed.dense()[..., :7])


def test_values_join_pickle_and_move() -> None:
    import copy
    import pickle

    value = polyattn_mask(B, 4, 4, attention_mask=PADDINGS["left"](4))
    window = polyattn_mask(B, 4, 4, mask_function=theirs.sliding_window_causal_mask_function(2))
    joined = value & window
    assert isinstance(joined, AttentionMaskValue)
    assert torch.equal(joined.dense(), value.dense() & window.dense())
    for twin in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), value.to("cpu")):
        assert torch.equal(twin.dense(), value.dense()) and twin.shape == value.shape
    assert value.to(torch.bool) is value and value.contiguous() is value
    meta = value.to("meta")
    assert isinstance(meta, AttentionMaskValue) and meta.device.type == "meta"
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(value)


def test_a_mask_function_reads_the_padding_once() -> None:
    reads = itertools.count()

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__ in ("__bool__", "item", "tolist", "numpy"):
                next(reads)
            return func(*args, **(kwargs or {}))

    with Counting():
        polyattn_mask(B, 8, 8, attention_mask=torch.ones(B, 8, dtype=torch.bool))
    assert next(reads) == 1


def near(size: int) -> Any:
    return lambda b, h, q, k: abs(q - k) < size


OWN = {
    "near": near(3),
    "near or causal window": theirs.or_masks(
        theirs.sliding_window_causal_mask_function(3), near(3)
    ),
    "always": theirs.or_masks(theirs.causal_mask_function, lambda *_: torch.tensor(True)),
    "a window apart": lambda b, h, q, k: (q - k >= 2) & (q - k < 4),
    "no band": lambda b, h, q, k: (q + k) % 3 != 0,
    "a band with a hole": lambda b, h, q, k: (abs(q - k) < 3) & ~((q == 5) & (k == 5)),
    "by the entry": lambda b, h, q, k: abs(q - k) < 2 + b,
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
def test_functions_of_models_say_what_they_say(place: str, padding: str) -> None:
    queries, keys, q_offset, kv_offset = PLACES[place]
    seen = min(q_offset + queries, kv_offset + keys)
    for name, function in OWN.items():
        call: dict[str, Any] = {
            "q_length": queries, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset,
            "mask_function": function, "attention_mask": PADDINGS[padding](seen),
        }  # fmt: skip
        made = polyattn_mask(batch_size=B, **call)
        stock = theirs.sdpa_mask(batch_size=B, **call | {"allow_is_causal_skip": False})
        dense = made.dense() if isinstance(made, AttentionMaskValue) else made
        assert torch.equal(dense.expand(B, 1, -1, -1), stock.expand(B, 1, -1, -1)), (name, made)


def test_which_functions_of_models_are_bands() -> None:
    made = {
        name: polyattn_mask(B, 16, 16, mask_function=function, attention_mask=PADDINGS["right"](16))
        for name, function in OWN.items()
    }
    shown = {n: repr(x.mask) for n, x in made.items() if isinstance(x, AttentionMaskValue)}
    padding = "Padding(q=None, kv=2)"
    assert shown == {
        "near": f"Window(left=2, right=2) & {padding}",
        "near or causal window": f"Window(left=2, right=2) & {padding}",
        "always": padding,
    }
