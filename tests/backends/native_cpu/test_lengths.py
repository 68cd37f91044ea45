"""Masks of lengths on the shortest way: each call's own lengths, checked each time."""

import pytest
import torch

from polyattn import Causal, InvalidProblem, Window, record_selections
from polyattn.masks import LeftPadding, Padding
from polyattn.torch import attention

torch.manual_seed(0)
Q = torch.randn(3, 4, 1, 16)


def keys(s):
    return torch.randn(3, 2, s, 16)


def both(q, k, mask):
    got = attention(q, k, k, mask=mask, layout="BNTH", backend="native_cpu")
    want = attention(q, k, k, mask=mask, layout="BNTH", backend="reference")
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "join",
    [
        lambda p: p,
        lambda p: Causal() & p,
        lambda p: p & Window(left=20),
        lambda p: p | Window(left=3),
        lambda p: (p & Causal()) | Window(left=2),
        lambda p: ~p & Causal(),
    ],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_each_call_has_its_own_lengths(join, rows):
    q = torch.randn(3, 4, rows, 16)
    for s in (40, 41, 63, 33):
        k = keys(s)
        for lengths in (
            torch.tensor([s, 7, 0]),
            torch.tensor([1, s, 20], dtype=torch.int32),
            torch.tensor([9, 1, s - 1, 1, 3, 1])[::2],
            [s, 1, 5],
        ):
            both(q, k, join(Padding(kv_lengths=lengths)))
            both(q, k, join(Padding(torch.tensor([rows, 0, rows]), lengths)))
            both(q, k, join(LeftPadding(kv_starts=lengths)))
            both(q, k, join(LeftPadding(torch.tensor([0, rows, 0]), lengths)))
            both(q, k, join(LeftPadding(None, [0, 1, 5]) & Padding(None, lengths)))


def test_they_are_admitted_each_time():
    k = keys(40)
    for lengths in (torch.tensor([40, 1, 2]), torch.tensor([3, 4, 5])):
        both(Q, k, Padding(kv_lengths=lengths))
    for wrong in ([41, 1, 2], [-1, 2, 3]):
        with pytest.raises(InvalidProblem, match="expected 0 to 40"):
            attention(Q, k, k, mask=Padding(kv_lengths=torch.tensor(wrong)), layout="BNTH")
        with pytest.raises(InvalidProblem, match=r"with starts from .* expected 0 to 40"):
            attention(Q, k, k, mask=LeftPadding(kv_starts=torch.tensor(wrong)), layout="BNTH")
    with pytest.raises(InvalidProblem, match="one length for each batch entry"):
        attention(Q, k, k, mask=Padding(kv_lengths=torch.tensor([1, 2])), layout="BNTH")
    many = torch.full((300,), 40)
    many[299] = 41  # so many that tensors compare them
    q, k = torch.randn(300, 1, 1, 8), torch.randn(300, 1, 40, 8)
    with pytest.raises(InvalidProblem, match="from 40 to 41"):
        attention(q, k, k, mask=Padding(kv_lengths=many), layout="BNTH")


def test_a_changed_tensor_is_read_again():
    k, lengths = keys(40), torch.tensor([40, 40, 40])
    mask = Padding(kv_lengths=lengths)
    for step in range(3):
        lengths.fill_(7 + step)
        for each in (mask, LeftPadding(kv_starts=lengths)):
            with record_selections() as ran:
                both(Q, k, each)
            assert ran[0].backend == "native_cpu"


def test_lengths_that_are_no_plain_tensors_take_the_other_way():
    class Mine(torch.Tensor):
        pass

    k = keys(40)
    both(Q, k, Padding(kv_lengths=torch.tensor([40, 1, 2])))
    both(Q, k, Padding(kv_lengths=torch.tensor([3, 1, 2]).as_subclass(Mine)))
    both(Q, k, Padding(kv_lengths=torch._lazy_clone(torch.tensor([5, 1, 2]))))
