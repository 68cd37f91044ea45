"""What every front-end of the C++ kernels shares; imports no framework.

The extension takes raw pointers and strides, so torch, NumPy and JAX reach the same binary:
`module` finds it, `program` turns masks into what it runs.
"""

from __future__ import annotations

from polyattn.native.program import (
    ArrayLibrary,
    Payload,
    Program,
    arrays_of,
    dense_program,
    encode,
    terms,
)

__all__ = ["ArrayLibrary", "Payload", "Program", "arrays_of", "dense_program", "encode", "terms"]
