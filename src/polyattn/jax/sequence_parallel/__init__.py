"""Attention over a sequence that is spread over devices: by a ring of keys, or by heads (Ulysses).

Both are called within ``jax.shard_map`` on each device's rows, take any backend that gives the
log-sum-exp for what is computed locally, and give one result whatever the number of devices.
"""
