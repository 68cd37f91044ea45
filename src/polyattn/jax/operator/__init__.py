"""Attention as an operator object: metadata, implementations by name, outputs, sharding by mode.

The names are those of EasyDeL's operator layer; each implementation calls
:func:`polyattn.jax.attention` with a backend of its own, so masks, refusals and results are
polyattn's.
"""
