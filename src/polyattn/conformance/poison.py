"""Which entries no visible result may depend on."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.conformance.cases import Case

__all__ = ["Flags", "hidden", "spread"]

Flags = tuple[Tensor, Tensor, Tensor]


def hidden(case: Case, seen: Tensor) -> Flags:
    """Flag the queries that see no key, and the keys and values that no query sees."""
    key = ~_by_group(case, seen.any(2)).any(2)
    return _arranged(case, ~seen.any(3)), _arranged(case, key), _arranged(case, key)


def spread(case: Case, seen: Tensor) -> tuple[Flags | None, Tensor]:
    """Flag one key that some queries attend and others do not; with it the rows that do not."""
    groups = case.n // case.k
    mixed = seen.any(2) & ~seen.all(2)
    found = mixed.nonzero()
    nothing = torch.zeros(seen.shape[:3], dtype=torch.bool)
    if not len(found):
        return None, nothing
    b, n, j = found[case.seed % len(found)].tolist()
    key = torch.zeros((seen.shape[0], case.k, seen.shape[3]), dtype=torch.bool)
    key[b, n // groups, j] = True
    struck = seen & key.repeat_interleave(groups, 1)[:, :, None]
    none = torch.zeros(seen.shape[:3], dtype=torch.bool)
    flags = _arranged(case, none), _arranged(case, key), _arranged(case, key)
    return flags, ~struck.any(-1)


def _by_group(case: Case, x: Tensor) -> Tensor:
    """(B, N, S) -> (B, K, N // K, S)."""
    return x.reshape(x.shape[0], case.k, -1, x.shape[2])


def _arranged(case: Case, flags: Tensor) -> Tensor:
    """(B, heads, length) -> flags that broadcast to the array of the call."""
    if case.packed:
        return flags[0].transpose(0, 1).unsqueeze(-1)
    return (flags if case.layout == "BNTH" else flags.transpose(1, 2)).unsqueeze(-1)
