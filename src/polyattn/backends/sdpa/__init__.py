"""The kernels behind torch's scaled_dot_product_attention."""
