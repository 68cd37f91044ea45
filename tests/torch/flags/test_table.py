"""The table of torch's knobs: complete, true to torch's own getters, and settable as it says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn.errors import FlagsError
from polyattn.torch.flags import Row, diff, flags, snapshot, table
from polyattn.torch.flags.tables import access, accesses
from tests.torch.flags import flag_names
from tests.torch.flags.flag_programs import settable, stand

MODULES = {
    "cpu", "cuda", "cuda.matmul", "cuda.cufft_plan_cache", "cudnn", "cudnn.conv", "cudnn.rnn",
    "cusparselt", "kleidiai", "mha", "miopen", "mkl", "mkldnn", "mkldnn.conv", "mkldnn.matmul",
    "mkldnn.rnn", "mps", "nnpack", "openmp", "opt_einsum", "python_native", "quantized", "xeon",
    "xnnpack",
}  # fmt: skip
LEFT_OUT = {
    "cudnn.CUDNN_TENSOR_DTYPES": "a constant",
    "cuda.Union": "a part of typing",
    "cudnn.is_acceptable": "answers about a tensor, and holds nothing",
    "cudnn.rnn.get_cudnn_mode": "turns a name into cuDNN's number",
    "cudnn.rnn.init_dropout_state": "a part of nn.RNN",
    "flags_frozen": "each row's `unsettable` says it",
    **dict.fromkeys(("cudnn.Optional", "cusparselt.Optional", "mps.Optional"), "a part of typing"),
    **dict.fromkeys(("mkldnn.TYPE_CHECKING", "mps.TYPE_CHECKING"), "a part of typing"),
    **dict.fromkeys(("mkl.VERBOSE_OFF", "mkl.VERBOSE_ON"), "an argument of mkl.verbose"),
    **dict.fromkeys(
        ("mkldnn.VERBOSE_OFF", "mkldnn.VERBOSE_ON", "mkldnn.VERBOSE_ON_CREATION"),
        "an argument of mkldnn.verbose",
    ),
    **dict.fromkeys(
        ("python_native.ContextProp", "python_native.DSLController", "python_native.PropModule",
         "python_native.PythonNativeModule"), "a class",
    ),
    **dict.fromkeys(
        ("xeon.run_cpu.REMAINDER", "xeon.run_cpu.format_str", "xeon.run_cpu.logger",
         "xeon.run_cpu.main"), "a part of the program xeon.run_cpu",
    ),
}  # fmt: skip
FOUND = sorted(flag_names.found())
ROWS = {row.name: row for row in table()}


def in_table(name: str) -> bool:
    try:
        return bool(access(name))
    except FlagsError:
        return False


@pytest.mark.parametrize("name", flag_names.DOCUMENTED)
def test_documented_name_leads_to_a_row(name: str) -> None:
    for spelling in (name, f"torch.backends.{name}"):
        row = ROWS[access(spelling).knob.name]
        assert row.readable or row.unreadable, spelling
        assert row.knob.about and row.knob.where, spelling


def test_every_name_below_torch_backends_is_in_the_table_or_left_out_with_a_reason() -> None:
    unknown = {n for n in FOUND if not in_table(n)} - MODULES - LEFT_OUT.keys()
    assert not unknown
    assert not {name for name in LEFT_OUT if in_table(name)}, "in the table after all"


@pytest.mark.skipif(not hasattr(torch.backends, "python_native"), reason="torch before 2.12")
def test_the_languages_of_torchs_own_operators_are_as_torch_says() -> None:
    native = torch.backends.python_native
    stand_now = {name: row.value for name, row in ROWS.items()}
    assert stand_now["python_native.all_dsls"] == sorted(native.all_dsls)
    assert stand_now["python_native.available_dsls"] == sorted(native.available_dsls)
    for language in native.all_dsls:
        part, controller = f"python_native.{language}", getattr(native, language)
        assert stand_now[f"{part}.available"] is controller.available
        assert stand_now[f"{part}.enabled"] is (not native.is_dsl_disabled(language))
        version = controller.version
        assert stand_now[f"{part}.version"] == (None if version is None else str(version))
        assert stand_now[f"{part}.operations"] == sorted(native.get_dsl_operations(language))
        assert not ROWS[f"{part}.version"].settable


def test_names_and_aliases_are_given_once() -> None:
    names = [
        spelling for one in accesses().values() for spelling in (one.knob.name, *one.knob.aliases)
    ]
    assert len(names) == len(set(names))


def test_what_rows_refer_to_exists() -> None:
    for row in ROWS.values():
        for other in row.knob.couples:
            assert other in ROWS, f"{row.name} is coupled to {other}"


backends = torch.backends
GETTERS: dict[str, Callable[[], Any]] = {
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "cuda.matmul.allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
    "fp32_precision": lambda: backends.fp32_precision,
    "cudnn.fp32_precision": lambda: backends.cudnn.fp32_precision,
    "mkldnn.fp32_precision": lambda: backends.mkldnn.fp32_precision,
    "cuda.matmul.fp32_precision": lambda: backends.cuda.matmul.fp32_precision,
    "cudnn.conv.fp32_precision": lambda: backends.cudnn.conv.fp32_precision,
    # torch 2.9 puts the module of that name over what has the attribute
    "cudnn.rnn.fp32_precision": lambda: getattr(
        backends.cudnn.rnn, "fp32_precision", torch._C._get_fp32_precision_getter("cuda", "rnn")
    ),
    "mkldnn.matmul.fp32_precision": lambda: backends.mkldnn.matmul.fp32_precision,
    "mkldnn.conv.fp32_precision": lambda: backends.mkldnn.conv.fp32_precision,
    "mkldnn.rnn.fp32_precision": lambda: backends.mkldnn.rnn.fp32_precision,
    "cuda.matmul.allow_fp16_reduced_precision_reduction":
        lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "cuda.matmul.allow_bf16_reduced_precision_reduction":
        lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cuda.matmul.allow_fp16_accumulation": lambda: backends.cuda.matmul.allow_fp16_accumulation,
    "cuda.flash_sdp_enabled": backends.cuda.flash_sdp_enabled,
    "cuda.mem_efficient_sdp_enabled": backends.cuda.mem_efficient_sdp_enabled,
    "cuda.math_sdp_enabled": backends.cuda.math_sdp_enabled,
    "cuda.cudnn_sdp_enabled": backends.cuda.cudnn_sdp_enabled,
    "cuda.fp16_bf16_reduction_math_sdp_allowed":
        backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    "cuda.preferred_linalg_library": lambda: enum(backends.cuda.preferred_linalg_library()),
    "cuda.preferred_blas_library": lambda: enum(backends.cuda.preferred_blas_library()),
    "cuda.preferred_rocm_fa_library": lambda: enum(torch._C._get_rocm_fa_preferred_backend()),
    "cuda.is_built": backends.cuda.is_built,
    "mha.fastpath_enabled": backends.mha.get_fastpath_enabled,
    "cudnn.enabled": lambda: backends.cudnn.enabled,
    "cudnn.benchmark": lambda: backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: backends.cudnn.deterministic,
    "cudnn.is_available": backends.cudnn.is_available,
    "miopen.immediate": lambda: backends.miopen.immediate,
    "mkldnn.enabled": lambda: backends.mkldnn.enabled,
    "mkldnn.deterministic": lambda: backends.mkldnn.deterministic,
    "mkldnn.is_available": backends.mkldnn.is_available,
    "mkl.is_available": backends.mkl.is_available,
    "nnpack.enabled": torch._C._get_nnpack_enabled,
    "nnpack.is_available": backends.nnpack.is_available,
    "openmp.is_available": backends.openmp.is_available,
    "opt_einsum.enabled": lambda: backends.opt_einsum.enabled,
    "opt_einsum.strategy": lambda: backends.opt_einsum.strategy,
    "opt_einsum.is_available": backends.opt_einsum.is_available,
    "quantized.engine": lambda: backends.quantized.engine,
    "quantized.supported_engines": lambda: sorted(backends.quantized.supported_engines),
    "xnnpack.enabled": lambda: importlib_xnnpack().enabled,
    "kleidiai.is_available": backends.kleidiai.is_available,
    "cusparselt.is_available": backends.cusparselt.is_available,
    "mps.is_built": backends.mps.is_built,
    "mps.is_available": backends.mps.is_available,
    "cpu.get_cpu_capability": backends.cpu.get_cpu_capability,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic_algorithms_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "utils.deterministic.fill_uninitialized_memory":
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    "num_threads": torch.get_num_threads,
    "num_interop_threads": torch.get_num_interop_threads,
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "default_device": lambda: str(torch.get_default_device()),
    "flush_denormal": lambda: (torch.tensor([1e-310], dtype=torch.float64) * 1).item() == 0,
    "grad_enabled": torch.is_grad_enabled,
    "inference_mode": torch.is_inference_mode_enabled,
    "autograd.anomaly_enabled": torch.is_anomaly_enabled,
    "autograd.multithreading_enabled": torch._C._is_multithreading_enabled,
    "sparse.check_sparse_tensor_invariants":
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
    "warn_always": torch.is_warn_always_enabled,
    "version": lambda: str(torch.__version__),
}  # fmt: skip
"""Torch's public way to ask, where it has one."""


def importlib_xnnpack() -> Any:
    import torch.backends.xnnpack

    return torch.backends.xnnpack


def enum(member: Any) -> str:
    return str(member).rpartition(".")[2].lower().removesuffix("backend")


@pytest.mark.parametrize("name", GETTERS)
def test_value_is_what_torch_says(name: str) -> None:
    if name in ROWS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own getters of the old names
            said = GETTERS[name]()
        found = {row.name: row for row in table()}[name]
        assert type(found.value) is type(said)
        assert str(found.value).lower() == str(said).lower()


CHOICES = [(name, value) for name, values in settable(possible=False).items() for value in values]


@pytest.mark.parametrize(("name", "value"), CHOICES, ids=[f"{n}={v}" for n, v in CHOICES])
def test_knob_can_be_set_to_each_allowed_value(name: str, value: Any) -> None:
    before = stand(later=True)
    changes = {name: value}
    if (
        name.endswith("_split_k") and not value
    ):  # torch keeps no reductions in 16 bits without splits
        changes[name.removesuffix("_split_k")] = False
    with flags(changes):
        found = access(name).read()
        if name == "cuda.sdp_priority":
            found = found[: len(value)]
        assert found == value or value in ("none", "default")
        if name in GETTERS:
            assert str(GETTERS[name]()).lower() == str(access(name).read()).lower()
        only = {name, *ROWS[name].knob.couples, *changes}
        assert diff(before["snapshot"], snapshot()).keys() <= only | inherited(name)
    assert stand(later=True) == before


def inherited(name: str) -> set[str]:
    """What reads differently when a precision changes."""
    if name in ("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"):
        return {"cudnn.allow_tf32"}  # which torch may then refuse to read
    levels = {"fp32_precision": "", "cudnn.fp32_precision": "cu", "mkldnn.fp32_precision": "mkldnn"}
    below = levels.get(name)
    return (
        set()
        if below is None
        else {n for n in ROWS if n.endswith("fp32_precision") and n.startswith(below)}
    )


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_row_that_cannot_be_set_refuses_with_its_reason(row: Row) -> None:
    if row.settable:
        pytest.skip("it can be set")
    before = stand()
    allowed = row.knob.allowed if isinstance(row.knob.allowed, tuple) else ()
    right = (0, 1) if row.knob.type == "int" else (row.value, True, "x", 1)
    for value in allowed or right:
        if not accesses()[row.name].lacks(value):  # opt_einsum, absent, can still be switched off
            continue
        with pytest.raises(FlagsError) as caught:
            flags({"cudnn.benchmark": True, row.name: value}).__enter__()
        assert row.unsettable in str(caught.value) and row.name in str(caught.value)
        assert stand() == before


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_row_says_all_there_is(row: Row) -> None:
    data = row.to_dict()
    assert data["name"] == row.name and data["about"]
    assert (row.value is None) or row.readable
    assert row.knob.about.endswith(".")
    if row.knob.kind == "function":
        assert row.knob.replaced_by and not row.readable and not row.settable
    if row.knob.kind == "query":
        assert row.unsettable
    if row.knob.kind == "knob" and row.readable and isinstance(row.knob.allowed, tuple):
        assert not row.knob.allowed or row.value in row.knob.allowed or not row.settable


BAD = [
    ("cudnn.benchmrk", True, "cudnn.benchmark"),
    ("allow_tf32", True, "cuda.matmul.allow_tf32"),
    ("torch.backends.cudnn.benchmrk", True, "cudnn.benchmark"),
    ("", True, "table()"),
    (None, True, "table()"),
    (3, True, "table()"),
    ("cudnn.benchmark", 1, "True or False"),
    ("cudnn.benchmark", None, "True or False"),
    ("cudnn.benchmark", "True", "True or False"),
    ("float32_matmul_precision", "low", "'highest', 'high', 'medium'"),
    ("float32_matmul_precision", ["high"], "'highest'"),
    ("num_threads", 0, "from 1 to 1024"),
    ("num_threads", True, "an int"),
    ("num_threads", 1.5, "an int"),
    ("num_threads", "2", "an int"),
    ("cuda.sdp_priority", [], "at least one"),
    ("cuda.sdp_priority", ["flash", "sdpa_flash"], "once"),
    ("cuda.sdp_priority", ["fast"], "math, flash"),
    ("cuda.sdp_priority", {"flash": 1}, "list"),
    ("cuda.sdp_priority", [None], "math, flash"),
    ("default_dtype", "int8", "float32"),
    ("default_dtype", "torch.int8", "float32"),
    ("quantized.engine", "nothing", "fbgemm"),
    ("deterministic_debug_mode", 3, "0, 1, 2"),
    ("deterministic_debug_mode", "loud", "0, 1, 2"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD, ids=[f"{n}={v!r}" for n, v, _ in BAD])
def test_bad_input_is_a_clear_error_and_nothing_is_set(name: Any, value: Any, says: str) -> None:
    before = stand()
    with pytest.raises(FlagsError) as caught:
        flags({"cudnn.benchmark": True, "flush_denormal": True} | {name: value}).__enter__()
    assert says in str(caught.value)
    assert "got " in str(caught.value)
    assert stand() == before


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("default_dtype", torch.bfloat16, "bfloat16"),
        ("deterministic_debug_mode", "warn", 1),
        ("cuda.preferred_blas_library", "cublas", "cublas"),
        ("cuda.preferred_blas_library", "hipblas", "cublas"),
        ("cuda.sdp_priority", "sdpa_math", ["math", "flash", "efficient", "cudnn", "overrideable"]),
        ("torch.backends.cudnn.benchmark", True, True),
        ("torch.backends.cuda.enable_flash_sdp", False, False),
        ("torch.set_float32_matmul_precision", "high", "high"),
    ],
)
def test_what_torch_takes_is_taken(name: str, given: Any, taken: Any) -> None:
    assert flags({name: given}).changes == {access(name).knob.name: taken}
