"""One module per backend; none imports another."""
