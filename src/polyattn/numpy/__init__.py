"""NumPy arrays into the C++ kernels, without torch: ``polyattn.numpy_attention``.

NumPy is imported by the first call, so that ``import polyattn`` stays free of frameworks. `call`
checks a call and runs it; `masks` makes what masks carry NumPy arrays; `arrays` takes the pointers
and strides.
"""

from polyattn.numpy.api import numpy_attention

__all__ = ["numpy_attention"]
