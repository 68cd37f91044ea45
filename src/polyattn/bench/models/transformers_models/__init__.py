"""transformers: every configuration that it has, the class that it configures, built small."""
