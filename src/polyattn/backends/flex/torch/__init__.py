"""torch's FlexAttention; see `polyattn.backends.flex.torch.backend`."""

from polyattn.backends.flex.torch.backend import load

__all__ = ["load"]
