"""What a backend declares, where plugins import it from; it lives in `polyattn.selection`."""

from polyattn.selection.capabilities import ALL_MASKS as ALL_MASKS
from polyattn.selection.capabilities import Capabilities as Capabilities
from polyattn.selection.capabilities import Reason as Reason
from polyattn.selection.capabilities import arch_number as arch_number
