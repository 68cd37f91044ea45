"""Comparing two activation traces: which module of a port is the first that is wrong.

:func:`compare` aligns the modules of two runs, checks what any comparison presumes (same inputs,
same weights), and blames the first deviation on whoever made it. :mod:`calibration` measures how
large deviations are that mean nothing. NumPy is needed, no framework.

In the order in which a comparison asks them:

- what is compared: `side` (one trace), `frames` (its calls), `rules` (what the user says of names);
- which is which: `alignment`, `alignment_by_place`, `parameters`, `weights` (modules),
  `counterparts`, `tensor_pairs` (tensors of a call);
- whether it may be compared: `guards`; how far apart: `distance`, `thresholds`, `noise`,
  `calibration`;
- who is to blame: `called`, `judge` (each call), `differences_of_form` (no fault),
  `changes_in_place`, `inputs_without_effect`, `not_handed_on`, `drift`, `blamed_weight`, and
  `blame`, which takes the first;
- what is said: `verdict`, `verdict_rows`, `verdict_text`. `comparison` runs it all.
"""

from polyattn.trace.compare.calibration import Floor
from polyattn.trace.compare.comparison import compare
from polyattn.trace.compare.verdict import Coverage, Culprit, Guard, Row, Verdict

__all__ = ["Coverage", "Culprit", "Floor", "Guard", "Row", "Verdict", "compare"]
