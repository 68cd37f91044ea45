"""torch's FlexAttention; see `polyattn.torch.backends.flex.backend`."""

from polyattn.torch.backends.flex.backend import load

__all__ = ["load"]
