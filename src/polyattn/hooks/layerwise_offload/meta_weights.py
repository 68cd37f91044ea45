"""Makes models whose weights are on no device, and whose buffers are computed all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

__all__ = ["without_weights"]


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made within the scope have their parameters on the meta device, their buffers not.

    For models whose weights come from files (`weights=` of `offload`). Under
    ``torch.device("meta")`` buffers lose their values too, and those that a checkpoint leaves out,
    such as the frequencies of rotary embeddings, cannot be got back. A parameter exists for the
    moment in which it is made, one at a time. In force for all threads.

    >>> import torch
    >>> from polyattn.hooks.layerwise_offload import without_weights
    >>> with without_weights():
    ...     layer = torch.nn.BatchNorm1d(3)
    >>> layer.weight.is_meta, layer.running_var
    (True, tensor([1., 1., 1.]))
    """

    def put(module: nn.Module, name: str, given: nn.Parameter) -> nn.Parameter | None:
        if given.is_meta or type(given) is not nn.Parameter:
            return None
        return nn.Parameter(given.detach().to("meta"), requires_grad=given.requires_grad)

    handle = register_module_parameter_registration_hook(put)  # type: ignore[arg-type]  # may replace
    try:
        yield
    finally:
        handle.remove()
