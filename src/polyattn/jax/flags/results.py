"""The options that change numbers: precision, types, random bits, and how a gradient is derived."""

from __future__ import annotations

from polyattn.jax.flags.declare import config

__all__ = ["RESULTS"]

_PRECISIONS = (
    None, "default", "high", "highest", "bfloat16", "tensorfloat32", "float32",
    "ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM", "ANY_F8_ANY_F8_ANY",
    "ANY_F8_ANY_F8_ANY_FAST_ACCUM", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16",
    "BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9",
    "TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32", "F64_F64_F64",
)  # fmt: skip
_GENERATORS = ("threefry2x32", "threefry4x32", "rbg", "unsafe_rbg", "philox2x32", "philox4x32")

RESULTS = (
    # Precision and types.
    config(
        "jax_default_matmul_precision", "str",
        "How precisely matmuls and convolutions of 32-bit inputs are computed.",
        allowed=_PRECISIONS,
        trap="None is the platform's default: TF32 on recent NVIDIA GPUs, bfloat16 on TPUs.",
    ),
    config(
        "jax_enable_x64", "bool", "Whether 64-bit types exist; without them they become 32-bit.",
    ),
    config(
        "jax_explicit_x64_dtypes", "str",
        "What asking for a 64-bit type by name does while jax_enable_x64 is off.",
        allowed=("warn", "error", "allow"), since="0.8.0",
    ),
    config(
        "jax_default_dtype_bits", "str", "The width of types that nobody named.",
        allowed=("_default", "32", "64"),
        builds="jax before 0.10.0",
        deprecated="0.9.0", replaced_by="jax_enable_x64",
        trap="Without effect in jax 0.9.",
    ),
    config(
        "jax_numpy_dtype_promotion", "str",
        "Whether mixed types promote silently or are an error.", allowed=("standard", "strict"),
    ),
    config(
        "jax_numpy_rank_promotion", "str",
        "Whether arrays of different rank broadcast silently, with a warning, or not.",
        allowed=("allow", "warn", "raise"),
    ),
    config(
        "jax_allow_f16_reductions", "bool",
        "Whether a sum in float16 or bfloat16 is allowed; if not it is an error.", since="0.9.1",
    ),
    # How functions and gradients are derived.
    config(
        "jax_softmax_custom_jvp", "bool",
        "Whether jax.nn.softmax has a derivative of its own, stabler and smaller.",
    ),
    config(
        "jax_use_direct_linearize", "bool",
        "Whether a function is linearized directly instead of by JVP and partial evaluation.",
        trap="Without effect from jax 0.10.2 on, which always does.",
    ),
    config(
        "jax_custom_vjp3", "bool", "Whether custom derivatives use the coming implementation.",
        since="0.9.1",
    ),
    config(
        "jax_remat3", "bool", "Whether jax.checkpoint uses the coming implementation.",
        since="0.10.2",
    ),
    config(
        "jax_scan3", "bool", "Whether loops use the coming implementation.", since="0.10.0",
    ),
    # Random bits.
    config(
        "jax_default_prng_impl", "str", "The generator of keys that name none.",
        allowed=_GENERATORS,
        trap="rbg and unsafe_rbg give other bits on another device or another version of XLA.",
    ),
    config(
        "jax_threefry_partitionable", "bool",
        "Whether threefry gives the same bits under any sharding, without communication.",
        trap="Changing it changes the random numbers of the same key.",
    ),
    config(
        "jax_threefry_gpu_kernel_lowering", "bool",
        "Whether threefry is one kernel on GPUs: faster to compile, at a cost in memory.",
    ),
    config("jax_random_seed_offset", "int", "What is added to every seed."),
    config(
        "jax_enable_custom_prng", "bool",
        "Whether jax.random.PRNGKey makes typed keys, as jax.random.key does.",
    ),
    config(
        "jax_legacy_prng_key", "str", "What raw (untyped) keys do where keys are taken.",
        allowed=("allow", "warn", "error"),
    ),
    config(
        "jax_high_dynamic_range_gumbel", "bool",
        "Whether Gumbel noise draws twice, so that improbable events are sampled right.",
    ),
    config(
        "jax_safer_randint", "bool", "Whether randint of 8 and 16 bits uses the safer algorithm.",
        since="0.7.1", builds="jax before 0.9.0", deprecated="0.7.2",
    ),
)  # fmt: skip
