"""Every class of masks says for itself what its users need: each test takes all that there are."""

from random import Random

import numpy as np
import pytest

import polyattn
from polyattn import InvalidProblem, Mask
from polyattn.masks import ALL_KINDS, LEAVES, OPERATORS, STATIC_KINDS, And, BlockMap, Index, Packed
from polyattn.masks.needs import Call, Sizes, dims_of
from polyattn.masks.structure import structure_of
from polyattn.native import encode
from tests.native.test_program import Arrays, picture, truth

SIZES = Sizes(b=2, t=7, s=10, n=3)
every_class = pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)


class Drawn:
    """Arrays of NumPy for examples."""

    def __init__(self, rng):
        self.draw = np.random.default_rng(rng.randrange(1 << 30))

    def lengths(self, shape, most):
        return self.draw.integers(0, most + 1, shape)

    def starts(self, shape, most):
        return self.lengths(shape, most)

    def ids(self, shape):
        return self.draw.integers(0, 3, shape)

    def offsets(self, shape, total):
        return np.linspace(0, total, shape).astype(int)

    def blocks(self, shape, columns):
        indices = self.draw.permuted(np.tile(np.arange(columns), (*shape[:3], 1)), axis=-1)
        return indices, self.draw.integers(0, columns + 1, shape[:3])

    def booleans(self, shape):
        return self.draw.random(dims_of(shape)) < 0.5


def examples(kind):
    """Return the example that explains a class, and drawn ones of each alignment it may have."""
    rng = Random(3)
    arrays = Drawn(rng)
    made = [kind.example(SIZES, arrays)]
    for align in {kind.only_align} - {None} or {"top_left", "bottom_right"}:
        numbers = [kind.draw(rng, align, packed=False) for _ in range(12)]
        made += [kind.example(SIZES, arrays, *each) for each in numbers]
    return made


def test_the_kinds_are_those_of_the_classes():
    subclasses = {kind for kind in Mask.__subclasses__() if kind.__module__.startswith("polyattn.")}
    subclasses |= set(And.__base__.__subclasses__())
    assert {*LEAVES, *OPERATORS} == subclasses - {And.__base__}
    assert {kind.__name__ for kind in (*LEAVES, *OPERATORS)} == ALL_KINDS
    assert STATIC_KINDS < ALL_KINDS
    assert all(getattr(polyattn, kind.__name__) is kind for kind in LEAVES)


@every_class
def test_examples_are_of_their_class(kind):
    for mask in examples(kind):
        assert type(mask) is kind
        assert mask.is_static == kind.static
        assert kind.only_align in (None, mask.align)
        again = kind(*mask.arguments)
        assert again == mask and hash(again) == hash(mask) and mask.map(lambda _, x: x) == mask


@every_class
def test_a_signature_is_enough_for_a_mask_like_it(kind):
    for mask in examples(kind):
        found = structure_of(mask.signature)
        like = kind.filled(SIZES, Drawn(Random(0)), *found.arguments, **found.named)
        assert like.signature == mask.signature


@every_class
def test_what_is_written_is_the_law(kind):
    for mask in examples(kind):
        if kind is Packed or encode(mask) is None:
            continue
        if isinstance(mask, BlockMap):  # whose law is asked at its bits where dims broadcast
            bits = Arrays().bits(mask).view(bool)
            mask = BlockMap(*mask.arguments, bits)
        assert np.array_equal(picture(mask), truth(mask)), mask


@every_class
def test_alignment_matters_to_those_that_take_it(kind):
    """A law of `simplify` leaves causal masks out, which others may be measured on."""
    if kind.takes_align:
        return
    for mask in examples(kind)[:5]:
        mask = BlockMap(*mask.arguments, Arrays().bits(mask)) if kind is BlockMap else mask
        for place in np.ndindex(SIZES.b, SIZES.n, SIZES.t, SIZES.s):
            found = {
                bool(mask.allows(Index(*place, SIZES.t, SIZES.s, align)))
                for align in ("top_left", "bottom_right")
            }
            assert len(found) == 1


def call(sizes, packed):
    return Call(sizes.b, sizes.n, sizes.t, sizes.s, packed, np.asarray, np.arange)


@every_class
def test_examples_fit_their_sizes_and_no_others(kind):
    for mask in examples(kind):
        mask.check(call(SIZES, kind is Packed))
    if not kind.static:
        with pytest.raises(InvalidProblem, match="expected"):
            kind.example(SIZES, Drawn(Random(1))).check(call(Sizes(9, 9, 9, 9), kind is Packed))
