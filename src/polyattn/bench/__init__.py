"""Honest timing of what polyattn costs, beside other libraries in the same run, with records.

``polyattn bench overhead`` prints what a call costs over the kernel it ends in;
``polyattn bench cpu`` how fast the CPU kernel is beside torch's;
``polyattn bench harm`` whether the automatic choice is ever slower than torch's own function;
``polyattn bench generate`` what a token of transformers takes, stock and through polyattn;
``polyattn bench models`` whether every model of a library gives the same on polyattn;
``polyattn bench offload`` whether offload is right, and as fast as its plan says;
``polyattn bench trace`` whether the trace names seeded bugs, and what recording costs;
``polyattn bench compare A.json B.json`` sets two records side by side.
"""

from polyattn.bench.command import main

__all__ = ["main"]
