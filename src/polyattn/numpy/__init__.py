"""NumPy arrays into the C++ kernels: what is behind ``polyattn.numpy_attention``.

`call` checks a call and runs it; `masks` makes what masks carry NumPy arrays; `arrays` takes the
pointers and strides.
"""
