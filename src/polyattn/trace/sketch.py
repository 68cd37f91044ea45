"""A face: the sketch of a tensor is `polyattn.trace.statistics.sketch`, and keeps this name."""

from polyattn.trace.statistics.sketch import (
    BUCKETS,
    NAME,
    decode,
    distance,
    encode,
    flat_index,
    sketch,
    splitmix64,
)

__all__ = ["BUCKETS", "NAME", "decode", "distance", "encode", "flat_index", "sketch", "splitmix64"]
