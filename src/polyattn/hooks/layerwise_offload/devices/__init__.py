"""What carries weights to where they are used: files to host memory, host memory to a device.

Each device keeps the same promise, by which no copy ever races with a computation:

- ``fetch(source, slot, users)`` fills a slot, but not before all is done that its users (streams)
  were told to do by then;
- ``await_filled(fetch)`` holds the caller's computation back until the slot is filled.
"""

from __future__ import annotations

from polyattn.hooks.layerwise_offload.devices.carrier import Carrier, Fetch
from polyattn.hooks.layerwise_offload.devices.of_device import carrier_for

__all__ = ["Carrier", "Fetch", "carrier_for"]
