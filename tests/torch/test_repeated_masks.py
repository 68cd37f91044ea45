"""A mask that comes again: its arrays may hold other values then, or be others."""

import gc

import pytest
import torch

from polyattn import Causal, LeftPadding, Padding
from polyattn.errors import InvalidProblem
from polyattn.torch import attention
from polyattn.torch.repeated_masks import signature_of

GRADS = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
BACKENDS = pytest.mark.parametrize("backend", ["native_cpu", "sdpa_flash"])


def _inputs(grad=False, batch=2):
    return (torch.randn(batch, 6, 2, 8, requires_grad=grad) for _ in range(3))


def _expected(q, k, v, mask):
    return attention(q, k, v, mask=mask, backend="reference")


@BACKENDS
@GRADS
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16], ids=str)
def test_lengths_that_are_written_between_calls(backend, grad, dtype):
    q, k, v = _inputs(grad)
    lengths = torch.tensor([6, 3], dtype=dtype)
    mask = Causal() & Padding(kv_lengths=lengths)
    for now in ([6, 3], [2, 5], [4, 4]):
        lengths.copy_(torch.tensor(now))
        lengths.data[0].fill_(now[0] - 1)  # a write that no version counts
        out = attention(q, k, v, mask=mask, backend=backend)
        fresh = Causal() & Padding(kv_lengths=lengths.to(torch.int64))
        torch.testing.assert_close(out, _expected(q, k, v, fresh))


@BACKENDS
@GRADS
def test_lengths_that_do_not_fit_any_more_are_refused(backend, grad):
    q, k, v = _inputs(grad)
    lengths = torch.tensor([6, 3])
    mask = Padding(kv_lengths=lengths) & LeftPadding(kv_starts=torch.tensor([0, 1]))
    for _ in range(2):
        attention(q, k, v, mask=mask, backend=backend)
    for wrong in (7, -1):
        lengths[1] = wrong
        with pytest.raises(InvalidProblem, match=str(wrong)):
            attention(q, k, v, mask=mask, backend=backend)
    lengths[1] = 3
    attention(q, k, v, mask=mask, backend=backend)


@BACKENDS
@GRADS
def test_lengths_whose_shape_or_memory_was_changed(backend, grad):
    q, k, v = _inputs(grad)
    lengths = torch.tensor([6, 3])
    mask = Padding(kv_lengths=lengths)
    for _ in range(2):
        attention(q, k, v, mask=mask, backend=backend)
    lengths.set_(torch.tensor([2, 5]))
    out = attention(q, k, v, mask=mask, backend=backend)
    torch.testing.assert_close(out, _expected(q, k, v, Padding(kv_lengths=torch.tensor([2, 5]))))
    lengths.resize_(3)
    lengths.copy_(torch.tensor([1, 2, 3]))
    with pytest.raises(InvalidProblem, match=r"\(3,\)"):
        attention(q, k, v, mask=mask, backend=backend)
    q, k, v = _inputs(grad, batch=3)
    out = attention(q, k, v, mask=mask, backend=backend)
    torch.testing.assert_close(out, _expected(q, k, v, Padding(kv_lengths=[1, 2, 3])))


def test_another_mask_in_the_place_of_one_that_ended():
    q, k, v = _inputs()
    for round in range(40):  # whose ids are given again
        lengths = torch.tensor([1 + round % 5, 6])
        mask = Padding(kv_lengths=lengths) if round % 2 else LeftPadding(kv_starts=lengths)
        out = attention(q, k, v, mask=mask)
        torch.testing.assert_close(out, _expected(q, k, v, mask))
        del mask
        if round % 7 == 0:
            gc.collect()


def test_two_masks_by_turns():
    q, k, v = _inputs()
    masks = [Causal() & Padding(kv_lengths=torch.tensor(x)) for x in ([6, 3], [2, 5])]
    expected = [_expected(q, k, v, mask) for mask in masks]
    for _ in range(3):
        for mask, want in zip(masks, expected, strict=True):
            torch.testing.assert_close(attention(q, k, v, mask=mask), want)


def test_signatures_follow_the_shapes_of_their_arrays():
    lengths = torch.tensor([3, 4])
    mask = Causal() & Padding(kv_lengths=lengths)
    before = signature_of(mask)
    assert before == mask.signature
    assert signature_of(mask) is before
    lengths.resize_(5)
    assert signature_of(mask) == mask.signature != before


def test_lengths_under_vmap_after_a_plain_call():
    q, k, v = _inputs()
    mask = Padding(kv_lengths=torch.tensor([6, 3]))
    plain = attention(q, k, v, mask=mask)
    many = torch.stack([q, 2 * q])
    mapped = torch.vmap(lambda x: attention(x, k, v, mask=mask))(many)
    torch.testing.assert_close(mapped[0], plain)
    torch.testing.assert_close(mapped[1], attention(2 * q, k, v, mask=mask))
