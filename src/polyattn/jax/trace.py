"""A face: the trace of JAX programs is `polyattn.trace.recorders.jax`, and keeps this name."""

from polyattn.trace.recorders.jax import JaxTrace, tap, tapped, trace

__all__ = ["JaxTrace", "tap", "tapped", "trace"]
