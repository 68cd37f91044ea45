"""What JAX kernels share: layouts, masks and biases as arrays, where NaN may go."""
