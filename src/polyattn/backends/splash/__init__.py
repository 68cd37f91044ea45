"""JAX's Splash kernel for TPUs, under our masks and our rules for rows without keys and NaN."""
