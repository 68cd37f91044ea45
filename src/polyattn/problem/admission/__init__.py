"""Whether a call is a call: every rule on the arguments of attention, for every way into it.

Eager, compiled, drop-in, paged and NumPy calls hand their arguments to the functions here, which
see plain numbers (sizes, the names of dtypes and devices, options) and import no framework. One
list of rules and one text for each error, whoever calls.
"""

from polyattn.problem.admission.arrays import ArrayFacts as ArrayFacts
from polyattn.problem.admission.arrays import Front as Front
from polyattn.problem.admission.arrays import Other as Other
from polyattn.problem.admission.arrays import Surroundings as Surroundings
from polyattn.problem.admission.call import Admitted as Admitted
from polyattn.problem.admission.call import admit as admit
from polyattn.problem.admission.call import truth as truth
from polyattn.problem.admission.codes import admit_quantized as admit_quantized
from polyattn.problem.admission.codes import check_scales as check_scales
from polyattn.problem.admission.pages import admit_pages as admit_pages
from polyattn.problem.admission.pages import check_lengths as check_lengths
from polyattn.problem.admission.sdpa import SdpaFacts as SdpaFacts
from polyattn.problem.admission.sdpa import only_torch as only_torch
