"""What the choice between the native CPU kernels and torch's own rests on.

An :class:`Evidence` is a value: figures by dtype and kind of problem, torch's time over that of the
native kernels. It comes from a record of such a machine that is shipped, or from a calibration of
this one; of a processor of which nothing is known there is none, and torch's own kernel runs.
"""

from polyattn.selection.evidence.figures import UNMEASURED, Evidence, Figure, Verdict
from polyattn.selection.evidence.problem_kinds import KINDS, kind_of
from polyattn.selection.processor_kind import Machine

__all__ = ["KINDS", "UNMEASURED", "Evidence", "Figure", "Machine", "Verdict", "kind_of"]
