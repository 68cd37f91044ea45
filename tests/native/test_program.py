"""Masks as programs of the native kernels: what is encoded, read back by pointers, is the mask."""

import ctypes
from random import Random

import numpy as np
import pytest

from polyattn.masks import (
    BlockMap,
    Causal,
    Chunked,
    Dense,
    Dilated,
    FirstKeys,
    Full,
    Index,
    LeftPadding,
    Mask,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.native import arrays_of, dense_program, encode, terms
from polyattn.native.program import (
    BAND,
    BLOCKS,
    BOTH,
    CHUNK,
    COMPLEMENT,
    DENSE,
    EITHER,
    EVERYTHING,
    FIRST_KEYS,
    KV_LIMIT,
    KV_START,
    MOST_DEPTH,
    MOST_TERMS,
    PACKED,
    Q_LIMIT,
    Q_START,
    SEGMENTS,
    STEP,
    UNBOUNDED,
    WIDTH,
)

B, N, T, S = 2, 3, 7, 10


class Arrays:
    """NumPy, as programs ask for a library of arrays."""

    def integers(self, payload):
        return np.ascontiguousarray(payload, dtype=np.int64)

    def bits(self, mask):
        bits = np.zeros((*np.shape(mask.counts), -(-S // mask.block_k)), dtype=np.uint8)
        for place in np.ndindex(*np.shape(mask.counts)):
            for block in np.asarray(mask.indices)[place][: np.asarray(mask.counts)[place]]:
                bits[(*place, block)] = 1
        return bits

    def allowed(self, payload):
        array = np.asarray(payload)
        return array.reshape((1,) * (4 - array.ndim) + array.shape).view(np.uint8)

    def memory(self, array):
        return array.ctypes.data, array.nbytes

    def strides(self, array):
        return [step // array.itemsize for step in array.strides]


def entry(pointer, index, kind):
    return kind.from_address(pointer + index * ctypes.sizeof(kind)).value


def asked(term, b, n, t, j, q_len, kv_len):
    """Answer one term for one query and key, from what its pointers point at."""
    kind, *rest = term
    long, byte = ctypes.c_int64, ctypes.c_uint8
    if kind == EVERYTHING:
        return True
    if kind == BAND:
        low, high, bottom_right = rest
        return low <= j - t - (kv_len - q_len if bottom_right else 0) <= high
    if kind in (CHUNK, STEP):
        size, bottom_right = rest
        own = t + (kv_len - q_len if bottom_right else 0)
        return j // size == own // size if kind == CHUNK else (j - own) % size == 0
    if kind == FIRST_KEYS:
        return j < rest[0]
    if kind in (KV_START, Q_START):
        return (j if kind == KV_START else t) >= entry(rest[0], b, long)
    if kind in (KV_LIMIT, Q_LIMIT):
        return (j if kind == KV_LIMIT else t) < entry(rest[0], b, long)
    if kind == SEGMENTS:
        q_ids, q_bytes, q_step, kv_ids, kv_bytes, kv_step = rest
        assert b * q_step + t < q_bytes // 8 and b * kv_step + j < kv_bytes // 8
        return entry(q_ids, b * q_step + t, long) == entry(kv_ids, b * kv_step + j, long)
    pointer, size, batch, head, row, column, *blocks = rest
    t, j = (t // blocks[0], j // blocks[1]) if kind == BLOCKS else (t, j)
    assert kind in (BLOCKS, DENSE)
    assert b * batch + n * head + t * row + j * column < size
    return bool(entry(pointer, b * batch + n * head + t * row + j * column, byte))


def picture(mask, dims=(B, N, T, S)):
    program = encode(mask)
    arrays = arrays_of(program, Arrays())
    found, packed = terms(program.codes, arrays, Arrays())
    assert packed is None and len(found) <= MOST_TERMS
    seen = np.zeros(dims, dtype=bool)
    for place in np.ndindex(*dims):
        stack = []
        for term in found:
            if term in ((BOTH,), (EITHER,)):
                last, first = stack.pop(), stack.pop()
                stack.append((first and last) if term == (BOTH,) else (first or last))
            elif term == (COMPLEMENT,):
                stack.append(not stack.pop())
            else:
                stack.append(asked(term, *place, *dims[2:]))
            assert len(stack) <= MOST_DEPTH
        (seen[place],) = stack
    return seen


def truth(mask, dims=(B, N, T, S)):
    align = mask.align or "bottom_right"
    return np.array(
        [mask.allows(Index(*place, *dims[2:], align)) for place in np.ndindex(*dims)], dtype=bool
    ).reshape(dims)


def block_map(indices, counts):
    """Return a block map; `allows` is asked at its bits, where heads and batch may broadcast."""
    bits = Arrays().bits(BlockMap(3, 4, indices, counts)).view(bool)
    return BlockMap(3, 4, indices, counts, bits)


def leaf(rng, align):
    draw = np.random.default_rng(rng.randrange(1 << 30))
    shape = tuple(rng.choice((1, size)) for size in (B, N, T, S))
    heads, blocks = (rng.choice((1, B)), rng.choice((1, N)), 3), 3
    every: list[Mask] = [
        Full(), Causal(align), Window(rng.choice((None, 2)), rng.choice((None, 0, 1))),
        Padding(rng.choice((None, [3, T])), rng.choice((None, draw.integers(0, S, B)))),
        Segments(draw.integers(0, 2, (B, T)), draw.integers(0, 2, S)),
        Segments(draw.integers(0, 2, (1, T)).astype(np.int32), draw.integers(0, 2, (B, S))),
        PrefixLM([4, 0]) if align == "bottom_right" else Causal(align),
        block_map(draw.permuted(np.tile(np.arange(blocks), (*heads, 1)), axis=-1),
                  draw.integers(0, blocks + 1, heads)),
        Dense(draw.random(shape) > 0.5), Dense(draw.random(shape[::-1]).T > 0.5),
        LeftPadding(rng.choice((None, [3, T])), rng.choice((None, draw.integers(0, S, B)))),
        Chunked(rng.choice((1, 2, 3, 9))), Dilated(rng.choice((1, 2, 5, 9))),
        FirstKeys(rng.choice((0, 1, 4, 99))),
    ]  # fmt: skip
    return rng.choice(every)


def tree(rng, align, depth):
    if depth == 0 or rng.random() < 0.3:
        return leaf(rng, align)
    parts = [tree(rng, align, depth - 1) for _ in range(rng.choice((2, 2, 3)))]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined & part if rng.random() < 0.5 else joined | part
    return ~joined if rng.random() < 0.2 else joined


@pytest.mark.parametrize("seed", range(100))
def test_what_is_encoded_is_the_mask(seed: int) -> None:
    rng = Random(seed)
    mask = tree(rng, rng.choice(("bottom_right", "top_left")), depth=seed % 3)
    assert np.array_equal(picture(mask), truth(mask)), mask


def test_no_mask_has_no_terms() -> None:
    assert encode(None).codes == ()
    assert encode(Full()).codes == (EVERYTHING, 0, 0, 0)


def test_bands_joined_by_and_are_one_term() -> None:
    program = encode(Causal("top_left") & Window(left=4, right=9) & Window(left=6))
    assert program.codes == (BAND, -4, 0, 0)


def test_bands_joined_by_or_stay_two() -> None:
    kinds = encode(Causal() | Window(left=2)).codes[::WIDTH]
    assert kinds == (BAND, BAND, EITHER)


def test_complements_of_half_open_bands_are_bands() -> None:
    program = encode(Causal("top_left") & ~Window(left=4))
    assert program.codes == (BAND, -UNBOUNDED, -5, 0)
    assert encode(~Causal() | FirstKeys(3)).codes[::WIDTH] == (BAND, FIRST_KEYS, EITHER)


def test_complements_come_after_their_member() -> None:
    def kinds(mask):
        return encode(mask).codes[::WIDTH]

    assert kinds(~Full()) == (EVERYTHING, COMPLEMENT)
    assert kinds(~(Causal() & FirstKeys(3))) == (BAND, FIRST_KEYS, BOTH, COMPLEMENT)
    assert kinds(Causal() & ~Chunked(2)) == (BAND, CHUNK, COMPLEMENT, BOTH)
    assert kinds(~~(~Padding(None, [1, 2]))) == (KV_LIMIT, COMPLEMENT)


def test_numbers_beyond_what_kernels_hold_mean_the_same() -> None:
    huge = 1 << 70
    assert encode(Window(huge, huge) & Causal()).codes == (BAND, -UNBOUNDED, 0, 1)
    assert encode(~Window(left=huge)).codes == (BAND, -UNBOUNDED, -UNBOUNDED, 1)


def test_window_takes_the_alignment_of_its_mask() -> None:
    assert encode(Window(left=2)).codes == (BAND, -2, UNBOUNDED, 1)
    joined = encode(Dense(np.ones((T, S), bool)) & (Causal("top_left") | Window(left=2)))
    assert {joined.codes[at + 3] for at in range(0, 16, 4) if joined.codes[at] == BAND} == {0}


def test_packed_is_no_term_and_names_both_offsets() -> None:
    program = encode(Packed([0, 3, 7], [0, 5, 10]) & Causal() & Padding(None, [4, 2]))
    assert program.codes[::WIDTH] == (PACKED, BAND, KV_LIMIT, BOTH)
    arrays = arrays_of(program, Arrays())
    found, packed = terms(program.codes, arrays, Arrays())
    assert len(found) == 3
    assert [entry(pointer, 1, ctypes.c_int64) for pointer in packed[::2]] == [3, 5]
    assert terms(*_alone(Packed([0, 7], [0, 10])))[0] == ()


def _alone(mask):
    program = encode(mask)
    return program.codes, arrays_of(program, Arrays()), Arrays()


def test_packed_segments_told_for_each_sequence_have_no_program() -> None:
    ids = np.zeros((2, 7), dtype=np.int64)
    assert encode(Packed([0, 3, 7]) & Segments(ids)) is None
    assert encode(Packed([0, 3, 7]) & Segments(ids[0])) is not None


def test_too_many_terms_and_too_deep_have_no_program() -> None:
    parts = [Dense(np.full((1, S), i % 2 == 0)) | Padding(None, [i, i]) for i in range(8)]
    wide = parts[0]
    for part in parts[1:]:
        wide = wide & part
    assert len(encode(wide).codes) // WIDTH == 31
    assert encode(wide & Dense(np.ones((T, S), bool))) is None
    deep: Mask = PrefixLM([1, 2])
    for i in range(MOST_DEPTH - 2):
        low = Dense(np.full((T, 1), i % 2 == 0))
        deep = low & (Padding([i, i], None) | deep) if i % 2 else low | (Causal() & deep)
    assert encode(deep) is None


def test_a_dense_stand_in_is_read_at_any_strides() -> None:
    seen = (np.random.default_rng(0).random((S, T, 1, B)) > 0.5).transpose(3, 2, 1, 0)
    program = dense_program(seen)
    ((kind, pointer, _, *steps),), _ = terms(program.codes, arrays_of(program, Arrays()), Arrays())
    assert kind == DENSE and steps == [1, 0, B, T * B]
    assert entry(pointer, steps[2] * 3 + steps[3] * 2, ctypes.c_uint8) == seen[0, 0, 3, 2]


def test_a_class_without_terms_has_no_program() -> None:
    class Odd(Mask):
        signature = "Odd()"

    assert encode(Odd()) is None
    assert encode(Causal() & (Odd() | Window(left=2))) is None
