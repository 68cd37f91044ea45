"""The table of polyattn.jax.flags is what jax declares, and leaves nothing out unseen."""

import dataclasses

import pytest

jax = pytest.importorskip("jax")

from polyattn import flags as knobs
from polyattn.jax import flags
from polyattn.jax.flags.reading import KNOBS, why_absent

GONE_THROUGH = "0.10.2"  # the jax whose options were all looked at
OPTIONS = {knob.name: knob for knob in KNOBS if knob.where.startswith("jax.config.")}
PRESENT = {name: knob for name, knob in OPTIONS.items() if name in jax.config.values}

LEFT_OUT = {
    "logs, tracebacks, dumps and names: nothing computed changes": """
        jax_captured_constants_report_frames jax_captured_constants_warn_bytes
        jax_compiler_detailed_logging_min_ops jax_debug_log_modules jax_distributed_debug
        jax_dump_ir_modes jax_dump_ir_to jax_explain_cache_misses
        jax_hlo_source_file_canonicalization_regex jax_include_debug_info_in_dumps
        jax_include_full_tracebacks_in_locations jax_log_checkpoint_residuals jax_log_compiles
        jax_logging_level jax_pallas_verbose_errors jax_pprint_use_color jax_source_url_schema
        jax_traceback_filtering jax_traceback_in_locations_limit
        jax_tracer_error_num_traceback_frames jax_debug_leaked_clients_on_clear_backends""",
    "how processes of a cluster find and reach each other": """
        jax_check_proxy_envs jax_cpu_get_global_topology_timeout_minutes
        jax_cpu_get_local_topology_timeout_minutes jax_cross_host_transfer_socket_address
        jax_cross_host_transfer_timeout_seconds jax_cross_host_transfer_transfer_size
        jax_cross_host_transport_addresses jax_enable_preemption_service jax_enable_recoverability
        jax_force_dcn_cross_host_transfers jax_share_binary_between_hosts
        jax_share_binary_between_hosts_timeout_ms jax_backend_target""",
    "machines that are not there": "jax_mock_gpu_topology mock_num_gpu_processes",
    "programs written to a file": """
        jax2tf_associative_scan_reductions jax2tf_default_native_serialization
        jax_export_calling_convention_version jax_export_ignore_forward_compatibility
        jax_serialization_version""",
    "whether a program is accepted, in JAX's own migrations": """
        check_vma jax_auto_pcast jax_disable_vmap_shmap_error jax_disallow_mesh_context_manager
        jax_mosaic_allow_hlo jax_remove_size_one_mesh_axis_from_type""",
}


def test_every_row_has_a_value_or_a_reason() -> None:
    rows = flags.table()
    assert len({row.name for row in rows}) == len(rows) > 80
    for row in rows:
        assert row.unsettable, f"{row.name}: nothing is set from here, and no word of how it is"
        assert row.knob.about.endswith("."), row.name
        assert row.readable == (row.unreadable == "")
    absent = OPTIONS.keys() - PRESENT.keys()
    assert {row.name for row in rows if row.unreadable} <= absent | {
        "backends.default",
        "backends.devices",
    }


def test_values_are_those_of_jax() -> None:
    held = jax.config.values
    for row in flags.table():
        if row.name not in PRESENT:
            continue
        raw = held[row.name]
        if row.knob.type == "bool":
            assert row.value is raw
        elif isinstance(row.knob.allowed, tuple):
            assert row.value in row.knob.allowed, row.name
        else:
            assert row.value == raw, row.name
            python = {"int": int, "str": str, "float": float}[row.knob.type]
            assert type(row.value) is python or (raw is None and "None" in row.knob.allowed)


@pytest.mark.parametrize("name", sorted(PRESENT))
def test_type_and_values_are_those_that_jax_declares(name: str) -> None:
    kind, _, more = jax.config.meta[name]
    knob = OPTIONS[name]
    if "enum_class" in more:
        declared = {member.lower() for member in more["enum_class"].__members__}
    else:
        declared = set(more.get("enum_values", ()))
    assert knob.type == (kind.__name__ if isinstance(kind, type) else "str")
    known = set(knob.allowed) - {None} if declared else set()
    assert declared <= known
    if jax.__version__ == GONE_THROUGH:
        assert declared == known
        takes_none = isinstance(knob.allowed, tuple) and None in knob.allowed
        assert takes_none == bool(declared and _takes_none(name))


def _takes_none(name: str) -> bool:
    before = jax.config.values[name]
    try:
        jax.config.update(name, None)
    except (TypeError, ValueError):
        return False
    jax.config.update(name, before)
    return True


@pytest.mark.parametrize("name", sorted(PRESENT))
def test_scope_is_a_thread_only_where_jax_has_a_value_for_a_thread(name: str) -> None:
    try:
        jax.config.read(name)  # refuses options that have a context manager
        per_thread = name == "jax_enable_x64"
    except AttributeError:
        per_thread = True
    if OPTIONS[name].scope == "thread":
        assert per_thread
    else:
        assert OPTIONS[name].freezes or not per_thread


@pytest.mark.skipif(jax.__version__ != GONE_THROUGH, reason=f"for jax {GONE_THROUGH}")
def test_every_option_of_jax_is_listed_or_left_out_for_a_reason() -> None:
    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    assert left_out & OPTIONS.keys() == set()
    assert left_out | PRESENT.keys() == set(jax.config.values)


def test_an_option_that_this_jax_lacks_is_listed_with_the_version_that_has_it() -> None:
    reasons = flags.snapshot()[knobs.META]["unreadable"]
    for name in OPTIONS.keys() - PRESENT.keys():
        assert name not in flags.snapshot()
        assert f"jax {jax.__version__}" in reasons[name]
        assert "; jax " in reasons[name] or "jax.experimental.pallas" in reasons[name]
    if jax.__version_info__ >= (0, 9, 0):
        assert reasons["jax_safer_randint"].endswith("jax before 0.9.0 does")
    if jax.__version_info__ < (0, 10, 2):
        assert reasons["jax_remat3"].endswith("jax 0.10.2 does")


def test_an_option_of_a_newer_jax_says_which() -> None:
    newer = dataclasses.replace(OPTIONS["jax_remat3"], name="jax_remat4", since="99.1.0")
    assert why_absent(newer) == f"jax {jax.__version__} does not have it; jax 99.1.0 does"


def test_an_option_that_a_newer_jax_dropped_says_who_had_it() -> None:
    dropped = dataclasses.replace(OPTIONS["jax_enable_x64"], name="jax_dropped")
    assert why_absent(dropped).endswith(f"does not have it; jax {GONE_THROUGH} does")
