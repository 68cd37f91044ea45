"""JAX's own attention, ``jax.nn.dot_product_attention``: XLA's unfused path, and cuDNN's kernel."""
