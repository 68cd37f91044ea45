"""The C++ kernels of this package on torch tensors, through raw pointers.

`native_kernel` prepares a kernel for a problem; `calls` runs the extension on tensors, whose
pointers and strides `arguments` takes; `autograd` makes the calls of eager code differentiable;
`operator` makes the same calls operators of torch, for compilers, exports and function transforms;
`derivatives` are theirs, and what the kernels have none of comes from `definition`.
"""

from polyattn.backends.native_cpu.torch import derivatives as _derivatives  # noqa: F401
