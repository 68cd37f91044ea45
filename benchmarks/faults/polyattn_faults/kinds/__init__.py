"""The kinds of bugs, by what they are about, each at the operation of a module's own code it is in.

A :class:`Kind` says of an operation whether the bug can be there, and computes the wrong result.
"""

from polyattn_faults.kinds.kind import Kind

__all__ = ["Kind"]
