"""The options that check: they make a program stop, or run slower, and leave results alone."""

from __future__ import annotations

from polyattn.jax.flags.declare import config

__all__ = ["CHECKS"]

_GUARD = (None, "allow", "log", "disallow", "log_explicit", "disallow_explicit")
_IGNORE = ("ignore", "raise")

CHECKS = (
    config(
        "jax_debug_nans", "bool", "Whether a NaN in a result is an error.",
        trap="Each call waits for its result, and one with a NaN runs again op by op.",
    ),
    config(
        "jax_debug_infs", "bool", "Whether an infinity in a result is an error.",
        trap="Scores masked with -inf are found too, and each call waits for its result.",
    ),
    config("jax_debug_key_reuse", "bool", "Whether using a random key twice is an error."),
    config("jax_enable_checks", "bool", "Whether JAX checks its own invariants; slow."),
    config("jax_check_tracer_leaks", "bool", "Whether a tracer that escapes is an error; slow."),
    config(
        "jax_check_static_indices", "bool", "Whether constant indices are checked for bounds.",
        since="0.8.2",
    ),
    config(
        "jax_disable_bwd_checks", "bool", "Whether checks of custom backward rules are left out.",
        since="0.9.0",
    ),
    config(
        "jax_mutable_array_checks", "bool", "Whether aliased mutable arrays are an error.",
    ),
    config(
        "jax_error_checking_behavior_nan", "str", "What jax.experimental's checks do with NaN.",
        allowed=_IGNORE,
    ),
    config(
        "jax_error_checking_behavior_divide", "str",
        "What jax.experimental's checks do with a division by zero.", allowed=_IGNORE,
    ),
    config(
        "jax_error_checking_behavior_oob", "str",
        "What jax.experimental's checks do with an index out of bounds.", allowed=_IGNORE,
    ),
    config(
        "jax_experimental_unsafe_xla_runtime_errors", "bool",
        "Whether checkify's checks may crash a compiled program.",
    ),
    config(
        "jax_pallas_enable_debug_checks", "bool", "Whether pl.debug_check checks.",
    ),
    config(
        "jax_pallas_poison_buffers", "bool",
        "Whether Pallas fills scratch buffers with NaN first.", since="0.10.2",
    ),
    config("jax_no_tracing", "bool", "Whether tracing is an error."),
    config("jax_no_execution", "bool", "Whether running a program is an error.", since="0.7.2"),
    config(
        "jax_thread_guard", "bool",
        "Whether a multi-process operation from another thread is an error.", since="0.9.0",
    ),
    config(
        "jax_transfer_guard", "str", "The three guards below at once.", allowed=_GUARD,
        couples=(
            "jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_device",
            "jax_transfer_guard_device_to_host",
        ),
        trap="It shows what was last set through it, not what the three are.",
    ),
    config(
        "jax_transfer_guard_host_to_device", "str",
        "What a transfer from the host that nobody asked for does.", allowed=_GUARD,
        trap="None is 'allow'; 'log_explicit' and 'disallow_explicit' cover jax.device_put too.",
    ),
    config(
        "jax_transfer_guard_device_to_device", "str",
        "What a transfer between devices that nobody asked for does.", allowed=_GUARD,
    ),
    config(
        "jax_transfer_guard_device_to_host", "str",
        "What a transfer to the host that nobody asked for does.", allowed=_GUARD,
    ),
    config(
        "jax_array_garbage_collection_guard", "str",
        "What an array that only the garbage collector frees does.",
        allowed=(None, "allow", "log", "fatal"),
    ),
)  # fmt: skip
