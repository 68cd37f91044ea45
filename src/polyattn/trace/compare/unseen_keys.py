"""Padded tokens that see no key: where right attention kernels differ.

The mask of a padded batch can leave a query no key, as of a token padded on the left under a causal
mask. Eager attention with finite numbers as mask then averages all values, other kernels give 0,
and no real token sees the difference. Statistics of whole tensors do, and do not tell it from a
fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyattn.trace.compare.called import Called
from polyattn.trace.compare.verdict import Culprit
from polyattn.trace.format.record import Record

__all__ = ["padding_notes"]


def padding_notes(calls: Sequence[Called], culprit: Culprit | None) -> Iterator[str]:
    """Yield that it may be padding which differs, where a module that takes a mask is blamed."""
    if culprit is None or culprit.kind == "parameter":
        return
    blamed = [call for call in calls if call.b.module == culprit.module]
    # one of them may make its mask by itself
    given = (record for call in blamed for side in (call.a, call.b) for record in side.ins)
    if not any(_is_mask(record) for record in given):
        return
    records = (record for call in calls for record in call.a.ins)
    padded = next((record for record in records if _hides_tokens(record)), None)
    if padded is not None:
        yield (
            f"{padded.tensor} hides {padded.zero} of {padded.n} tokens: a query that sees no key, "
            "as of a token padded on the left, is the mean of all values in eager attention and 0 "
            "in other kernels. Such tokens differ between right ports: compare a batch without "
            "padding to tell that from a fault"
        )


def _is_mask(record: Record) -> bool:
    """Whether it says which keys are seen: by its name, as booleans, or as numbers to add."""
    added = record.max == 0 and record.min is not None and record.min <= -1e4
    return "mask" in record.tensor or (len(record.shape) > 2 and (added or record.dtype == "bool"))


def _hides_tokens(record: Record) -> bool:
    """Whether it is a mask of zeros and ones, (batch, tokens), with some of either."""
    named = "mask" in record.tensor or record.tensor.startswith("args[")
    if not named or len(record.shape) != 2 or not record.zero or record.l1 is None:
        return False
    return record.min == 0 and record.max == 1 and record.l1 == record.n - record.zero
