"""Comparing two activation traces: which module of a port is the first that is wrong.

:func:`compare` aligns the modules of two runs, checks what any comparison presumes (same inputs,
same weights), and blames the first deviation on whoever made it. :mod:`calibration` measures how
large deviations are that mean nothing. NumPy is needed, no framework.
"""

from polyattn.trace.compare.calibration import Floor
from polyattn.trace.compare.comparison import compare
from polyattn.trace.compare.verdict import Coverage, Culprit, Guard, Row, Verdict

__all__ = ["Coverage", "Culprit", "Floor", "Guard", "Row", "Verdict", "compare"]
