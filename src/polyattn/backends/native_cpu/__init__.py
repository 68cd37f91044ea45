"""The C++ kernels of this package, forward and backward."""
