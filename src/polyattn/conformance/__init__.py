"""Conformance: random problems, an independent oracle, one tolerance, and verdicts on backends.

Both lies are hunted: a problem that was accepted and comes out wrong, and a problem that was
refused although the backend can run it. ``polyattn fuzz`` and the test-suite share this package.
"""

from __future__ import annotations

from polyattn.conformance.cases import Case
from polyattn.conformance.check import Verdict, examine
from polyattn.conformance.fuzz import run
from polyattn.conformance.generate import random_case
from polyattn.conformance.report import Report

__all__ = ["Case", "Report", "Verdict", "examine", "random_case", "run"]
