"""What torch kernels share: layouts, dense masks and biases, NaN isolation, empty answers."""
