"""What makes records of a running program: of NumPy arrays, of torch modules, of JAX programs."""
