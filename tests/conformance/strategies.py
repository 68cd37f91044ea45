"""Hypothesis strategies for cases: the same generator as `polyattn fuzz`, drawn by hypothesis."""

from hypothesis import strategies as st

from polyattn.conformance import Case, random_case


def cases() -> st.SearchStrategy[Case]:
    """Random cases whose draws hypothesis controls, so that it can make failures smaller."""
    return st.builds(random_case, st.randoms(use_true_random=False))
