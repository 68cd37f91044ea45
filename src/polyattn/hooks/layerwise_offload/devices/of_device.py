"""Which carrier a device has."""

from __future__ import annotations

import torch

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.devices.carrier import Carrier

__all__ = ["carrier_for"]


def carrier_for(device: torch.device) -> Carrier:
    """Return what carries weights to a device.

    >>> import torch
    >>> from polyattn.hooks.layerwise_offload.devices import carrier_for
    >>> carrier_for(torch.device("cpu")).needs_files
    True
    """
    if device.type == "cpu":
        from polyattn.hooks.layerwise_offload.devices.host import HostCarrier

        return HostCarrier()
    if device.type in ("cuda", "xpu"):
        from polyattn.hooks.layerwise_offload.devices.accelerator import AcceleratorCarrier

        return AcceleratorCarrier(device)
    raise OffloadError(
        f"got device={str(device)!r}, expected 'cpu' (weights stay in files), 'cuda' or 'xpu'"
    )
