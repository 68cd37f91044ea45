"""``polyattn bench jax``: JAX's calls beside ``jax.nn.dot_product_attention``, in one run."""
