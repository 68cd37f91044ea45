"""Whether a call is a call: every rule on the arguments of attention, for every way into it.

Eager, compiled, drop-in, paged and NumPy calls hand their arguments to the functions here, which
see plain numbers (sizes, the names of dtypes and devices, options) and import no framework. One
list of rules and one text for each error, whoever calls.
"""

from polyattn.admission.arrays import ArrayFacts as ArrayFacts
from polyattn.admission.arrays import Front as Front
from polyattn.admission.arrays import Other as Other
from polyattn.admission.arrays import Surroundings as Surroundings
from polyattn.admission.call import Admitted as Admitted
from polyattn.admission.call import admit as admit
from polyattn.admission.pages import admit_pages as admit_pages
from polyattn.admission.pages import check_lengths as check_lengths
from polyattn.admission.sdpa import SdpaFacts as SdpaFacts
from polyattn.admission.sdpa import only_torch as only_torch
