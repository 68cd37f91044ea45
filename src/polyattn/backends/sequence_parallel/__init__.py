"""Attention over a sequence that is spread over devices, by any other backend on each of them."""
