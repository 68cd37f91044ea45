"""The C++ kernels of this package on torch tensors, through raw pointers.

`backend` prepares a kernel for a problem; `calls` runs the extension on tensors, whose pointers
and strides `arguments` takes; `operator` makes the same calls operators of torch, for compilers,
exports and function transforms.
"""
