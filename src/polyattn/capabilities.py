"""What a backend declares, where plugins import it from; it lives in `polyattn.selection`."""

from polyattn.selection.capabilities import ALL_MASKS, Capabilities, Reason, arch_number

__all__ = ["ALL_MASKS", "Capabilities", "Reason", "arch_number"]
