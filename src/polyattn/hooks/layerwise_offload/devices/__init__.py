"""What carries weights to where they are used: files to host memory, host memory to a device.

Each device keeps the same promise, by which no copy ever races with a computation:

- ``fetch(source, slot, users)`` fills a slot, but not before all is done that its users (streams)
  were told to do by then;
- ``await_filled(fetch)`` holds the caller's computation back until the slot is filled.
"""

from __future__ import annotations

import torch

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.devices.carrier import Carrier, Fetch

__all__ = ["Carrier", "Fetch", "carrier_for"]


def carrier_for(device: torch.device) -> Carrier:
    """Return what carries weights to a device."""
    if device.type == "cpu":
        from polyattn.hooks.layerwise_offload.devices.host import HostCarrier

        return HostCarrier()
    if device.type in ("cuda", "xpu"):
        from polyattn.hooks.layerwise_offload.devices.accelerator import AcceleratorCarrier

        return AcceleratorCarrier(device)
    raise OffloadError(
        f"got device={str(device)!r}, expected 'cpu' (weights stay in files), 'cuda' or 'xpu'"
    )
