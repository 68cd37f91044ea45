"""torch's FlexAttention; see `polyattn.backends.flex.torch.flex_kernel`."""

from polyattn.backends.flex.torch.flex_kernel import load

__all__ = ["load"]
