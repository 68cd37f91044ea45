"""Whether a call is a call: every rule on the arguments of attention, for every way into it.

Eager, compiled, drop-in, paged and NumPy calls hand their arguments to the functions here, which
see plain numbers (sizes, the names of dtypes and devices, options) and import no framework. One
list of rules and one text for each error, whoever calls.
"""

from polyattn.admission.arrays import ArrayFacts, Front, Other, Surroundings
from polyattn.admission.call import Admitted, admit
from polyattn.admission.pages import admit_pages, check_lengths
from polyattn.admission.sdpa import SdpaFacts, only_torch

__all__ = [
    "Admitted",
    "ArrayFacts",
    "Front",
    "Other",
    "SdpaFacts",
    "Surroundings",
    "admit",
    "admit_pages",
    "check_lengths",
    "only_torch",
]
