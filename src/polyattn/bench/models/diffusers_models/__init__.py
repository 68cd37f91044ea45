"""The transformers of diffusers, built small from configurations and the shapes of their inputs."""
