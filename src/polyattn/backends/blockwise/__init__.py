"""Attention in plain JAX, block by block: the scores are never materialised."""
