"""The options that change where and how fast a program runs: devices, kernels, the compiler."""

from __future__ import annotations

from polyattn.jax.flags.declare import config

__all__ = ["EXECUTION"]

_VISIBLE = "'all' or device numbers separated by commas"
_LEVELS = ("UNKNOWN", "O0", "O1", "O2", "O3")
_EFFORT = "a number from -1.0 to 1.0"

PLACEMENT = (
    config(
        "jax_default_device", "str",
        "The device of new arrays and of programs whose inputs are nowhere in particular.",
        allowed="a platform, a device as 'platform:number', or None for the first device there is",
    ),
    config(
        "jax_platforms", "str", "The platforms to start, the default first.", freezes=True,
        allowed="names separated by commas, or None for whatever starts",
    ),
    config(
        "jax_platform_name", "str", "The platform that is used when none is named.", process=True,
        allowed="a platform's name, or '' for the first of jax_platforms",
        replaced_by="jax_platforms", deprecated="before 0.7",
    ),
    config(
        "jax_xla_backend", "str", "The backend that is used when none is named.", process=True,
        allowed="a platform's name, or '' for the first of jax_platforms",
        replaced_by="jax_platforms", deprecated="before 0.7",
    ),
    config(
        "jax_num_cpu_devices", "int", "How many devices the CPU pretends to be.", low=-1,
        allowed="-1 leaves it to --xla_force_host_platform_device_count", freezes=True,
    ),
    config(
        "jax_cuda_visible_devices", "str", "The CUDA devices that JAX may use.",
        allowed=_VISIBLE, freezes=True,
    ),
    config(
        "jax_rocm_visible_devices", "str", "The ROCm devices that JAX may use.",
        allowed=_VISIBLE, freezes=True,
    ),
    config(
        "jax_oneapi_visible_devices", "str", "The oneAPI devices that JAX may use.",
        allowed=_VISIBLE, freezes=True, since="0.10.1",
    ),
    config(
        "jax_sort_devices_by_process_index", "bool",
        "Whether devices are ordered by process first, or by their number alone.",
        freezes=True, since="0.9.1",
    ),
    config(
        "jax_cpu_collectives_implementation", "str",
        "What carries collectives between processes on CPUs.",
        allowed=(None, "gloo", "mpi", "megascale"), freezes=True,
    ),
    config(
        "jax_pjrt_client_create_options", "str", "Options for the platform's plugin.",
        allowed="'name:value' separated by semicolons, or None", freezes=True,
    ),
    config(
        "jax_use_shardy_partitioner", "bool",
        "Whether Shardy instead of GSPMD partitions a program over devices.",
    ),
)  # fmt: skip

KERNELS = (
    config(
        "jax_pallas_use_mosaic_gpu", "bool",
        "Whether Pallas kernels on GPUs are lowered to Mosaic GPU instead of Triton.",
    ),
    config(
        "jax_use_emit_pipeline_primitive", "bool",
        "Whether a pipeline inside a Pallas kernel is kept as one operation.", since="0.10.2",
    ),
    config(
        "jax_ragged_dot_use_ragged_dot_instruction", "bool",
        "Whether ragged_dot is one instruction on TPUs.",
    ),
    config(
        "jax_ragged_dot_use_gpu_pallas_triton_lowering", "bool",
        "Whether ragged_dot is a Pallas Triton kernel on GPUs.", since="0.10.0",
    ),
    config("jax_bcoo_cusparse_lowering", "bool", "Whether BCOO operations call cuSPARSE."),
    config(
        "jax_use_magma", "str", "Whether eigenvalues on GPUs come from MAGMA.",
        allowed=("off", "on", "auto"),
    ),
)  # fmt: skip

COMPILER = (
    config(
        "jax_disable_jit", "bool", "Whether jax.jit does nothing and Python runs op by op.",
        trap="jax.vmap and jax.grad still trace; lax loops become Python loops.",
    ),
    config(
        "jax_disable_most_optimizations", "bool",
        "Whether XLA leaves out its expensive optimizations.", process=True,
        trap="Made for tests: fast to compile, slow to run, and sums may be ordered differently.",
    ),
    config(
        "jax_optimization_level", "str", "How hard XLA works for speed.", allowed=_LEVELS,
    ),
    config(
        "jax_exec_time_optimization_effort", "float", "How hard XLA works for speed.",
        allowed=_EFFORT,
    ),
    config(
        "jax_memory_fitting_level", "str", "How hard XLA works to fit into memory.",
        allowed=_LEVELS,
    ),
    config(
        "jax_memory_fitting_effort", "float", "How hard XLA works to fit into memory.",
        allowed=_EFFORT,
    ),
    config(
        "jax_compiler_enable_remat_pass", "bool",
        "Whether XLA may compute again what it has no memory to keep.",
    ),
    config(
        "jax_enable_pgle", "bool",
        "Whether a program is compiled again with the latencies of its first runs.",
        trap="The first jax_pgle_profiling_runs calls run other code than the later ones.",
    ),
    config("jax_pgle_profiling_runs", "int", "How many runs are profiled for that."),
    config(
        "jax_pgle_aggregation_percentile", "int", "How profiles of several devices become one.",
    ),
    config("jax_xla_profile_version", "int", "The profile with which XLA compiles, 0 for none."),
    config(
        "eager_constant_folding", "bool", "Whether constants are folded while tracing.",
    ),
    config(
        "jax_use_simplified_jaxpr_constants", "bool",
        "Whether captured constants stay literals of the program.",
    ),
    config(
        "jax_embedded_constants_max_bytes", "int",
        "The size above which a captured constant becomes an argument.", since="0.10.1",
    ),
    config(
        "jax_refs_to_pins", "bool", "Whether refs are lowered to pinned buffers.", since="0.8.0",
    ),
)  # fmt: skip

DISPATCH = (
    config(
        "jax_cpu_enable_async_dispatch",
        "bool",
        "Whether programs on the CPU run beside Python instead of in the call.",
        freezes=True,
        trap="A timing that does not wait for the result measures the dispatch alone.",
    ),
    config(
        "jax_send_traceback_to_runtime",
        "str",
        "How much of Python's stack each dispatch hands to the runtime.",
        allowed=("off", "on", "full"),
        since="0.8.1",
        trap="'full' makes every call slower.",
    ),
)

CACHE = (
    config(
        "jax_enable_compilation_cache", "bool", "Whether compiled programs are kept on disk.",
        trap="Without jax_compilation_cache_dir nothing is kept.",
    ),
    config(
        "jax_compilation_cache_dir", "str", "Where they are kept.", allowed="a folder, or None",
        trap="The first compilation fixes it.",
    ),
    config(
        "jax_compilation_cache_max_size", "int", "How many bytes are kept.", low=-1,
        allowed="-1 is no limit, 0 is no cache",
    ),
    config(
        "jax_persistent_cache_min_compile_time_secs", "float",
        "The compile time below which a program is not kept.", allowed="seconds",
    ),
    config(
        "jax_persistent_cache_min_entry_size_bytes", "int",
        "The size below which a program is not kept.", low=-1, allowed="-1 is no limit",
    ),
    config(
        "jax_persistent_cache_enable_xla_caches", "str", "Which caches of XLA are kept beside it.",
        allowed="'all', 'none' or names of XLA's flags separated by commas",
    ),
    config(
        "jax_compilation_cache_include_metadata_in_key", "bool",
        "Whether a moved line of source makes another program.",
    ),
    config(
        "jax_compilation_cache_expect_pgle", "bool",
        "Whether programs compiled with profiles are preferred.",
    ),
    config(
        "jax_compilation_cache_check_contents", "bool",
        "Whether what is found is compared with a fresh compilation.", since="0.9.1",
    ),
    config(
        "jax_raise_persistent_cache_errors", "bool",
        "Whether a cache that cannot be read or written is an error instead of a warning.",
    ),
    config(
        "jax_remove_custom_partitioning_ptr_from_cache_key", "bool",
        "Whether programs that differ only in a custom partitioning share an entry.",
        trap="May load the wrong program.",
    ),
)  # fmt: skip

EXECUTION = (*PLACEMENT, *KERNELS, *COMPILER, *DISPATCH, *CACHE)
