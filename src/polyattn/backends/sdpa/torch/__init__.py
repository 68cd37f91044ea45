"""The four kernels behind torch's scaled_dot_product_attention, each called directly.

No global switch of torch is read or set: ``torch.ops.aten`` has every kernel by name. What the
operators lack is lowered here, exactly: masks and biases become additive tensors, key/value
groups are folded into query rows (never repeated), sinks become one more key whose score is the
sink, and rows that see no key are zeroed. Traps of the direct calls are kept from callers: the
CPU flash operator ends the process on empty sequences (the front-end answers those), returns
wrong values for a strided last dim (copied), and an lse of 0 for empty rows (rewritten); the math
operator adds boolean masks up as numbers (never handed any).
"""

from polyattn.backends.sdpa.torch.portable import load_portable
from polyattn.backends.sdpa.torch.sdpa_kernels import (
    load_cudnn,
    load_efficient,
    load_flash,
    load_math,
)

__all__ = ["load_cudnn", "load_efficient", "load_flash", "load_math", "load_portable"]
