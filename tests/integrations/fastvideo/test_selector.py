"""The selector's API: every entity by the name its document gives it, on the one mechanism."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum, auto

import numpy as np
import pytest
import torch

from polyattn import (
    Causal,
    InvalidProblem,
    UnknownBackend,
    Unsupported,
    record_selections,
    use_backend,
)
from polyattn.integrations.fastvideo import selector
from polyattn.integrations.fastvideo.layer import AttentionBackend
from polyattn.integrations.fastvideo.selector import (
    NO_REQUEST,
    AttentionBackendEnum,
    backend_name_to_enum,
    explain_attn_backend,
    get_attn_backend,
    get_env_variable_attn_backend,
    get_global_forced_attn_backend,
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
)
from polyattn.selection.registry import IN_TREE, registry
from polyattn.torch import attention, explain

Q = torch.randn(1, 8, 2, 16)


class FastVideoEnum(Enum):
    """As in fastvideo.platforms: the values are numbers."""

    FLASH_ATTN = auto()
    TORCH_SDPA = auto()
    SAGE_ATTN = auto()
    VIDEO_SPARSE_ATTN = auto()


class DottedEnum(Enum):
    """As in vllm: the values are paths of classes, or empty."""

    FLEX = "vllm.v1.attention.backends.flex.FlexBackend"
    SDPA_MATH = ""


@pytest.fixture(autouse=True)
def _unforced() -> Iterator[None]:
    global_force_attn_backend(None)
    yield
    global_force_attn_backend(None)


def test_enum_has_every_in_tree_backend_and_no_other() -> None:
    assert IN_TREE
    names = {m.value for m in AttentionBackendEnum} - set(registry.groups())
    assert names == {n for n in registry.names() if n in names} and "reference" in names
    for member in AttentionBackendEnum:
        assert member.name == member.value.upper()
        assert registry.expand(member, asked_by="test")
    assert not {"FLASH_ATTN", "SAGE_ATTN", "VIDEO_SPARSE_ATTN"} & set(
        AttentionBackendEnum.__members__
    )


def test_names_to_members() -> None:
    assert backend_name_to_enum("SDPA_FLASH") is AttentionBackendEnum.SDPA_FLASH
    assert backend_name_to_enum("TORCH_SDPA") is AttentionBackendEnum.TORCH_SDPA
    assert backend_name_to_enum("NO_SUCH") is None
    with pytest.raises(InvalidProblem, match="NoneType"):
        backend_name_to_enum(None)  # type: ignore[arg-type]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_env_variable_attn_backend() is None
    monkeypatch.setenv("POLYATTN_BACKEND", "SDPA_MATH")
    assert get_env_variable_attn_backend() is AttentionBackendEnum.SDPA_MATH
    monkeypatch.setenv("POLYATTN_BACKEND", "  ")
    assert get_env_variable_attn_backend() is None
    monkeypatch.setenv("POLYATTN_BACKEND", "SDPA_MAHT")
    with pytest.raises(UnknownBackend, match="sdpa_math"):
        get_env_variable_attn_backend()


def test_forcing_is_seen_everywhere() -> None:
    assert get_global_forced_attn_backend() is None
    assert selector.forced_attn_backend is None
    global_force_attn_backend(AttentionBackendEnum.SDPA_MATH)
    assert selector.forced_attn_backend is AttentionBackendEnum.SDPA_MATH
    assert get_global_forced_attn_backend() is AttentionBackendEnum.SDPA_MATH
    seen: list[str] = []

    def work() -> None:
        with record_selections() as ran:
            attention(Q, Q, Q)
        seen.append(ran[0].backend)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["sdpa_math"]
    global_force_attn_backend(None)
    assert selector.forced_attn_backend is None


def test_forcing_nothing_registered_changes_nothing() -> None:
    global_force_attn_backend("reference")
    with pytest.raises(UnknownBackend):
        global_force_attn_backend("refrence")
    assert get_global_forced_attn_backend() is AttentionBackendEnum.REFERENCE


def test_context_manager_restores_nested_and_under_exceptions() -> None:
    with global_force_attn_backend_context_manager(AttentionBackendEnum.REFERENCE):
        with pytest.raises(KeyError), global_force_attn_backend_context_manager("sdpa_math"):
            assert get_global_forced_attn_backend() is AttentionBackendEnum.SDPA_MATH
            raise KeyError
        assert get_global_forced_attn_backend() is AttentionBackendEnum.REFERENCE
        with global_force_attn_backend_context_manager(None):
            assert get_global_forced_attn_backend() is None
        assert get_global_forced_attn_backend() is AttentionBackendEnum.REFERENCE
    assert get_global_forced_attn_backend() is None


def test_a_group_is_forced_in_order() -> None:
    with global_force_attn_backend_context_manager(AttentionBackendEnum.TORCH_SDPA):
        with record_selections() as ran:
            attention(Q, Q, Q)
            attention(Q, Q, Q, dropout_p=0.5)
        assert [r.backend for r in ran] == ["sdpa_flash", "sdpa_math"]
        assert {str(r.source) for r in ran} == {"FORCED"}


@pytest.mark.parametrize("kind", [tuple, list, set, frozenset, iter])
def test_layer_lists_of_any_kind(kind: type) -> None:
    cls = get_attn_backend(64, torch.float32, kind([AttentionBackendEnum.SDPA_MATH]))
    assert cls.get_name() == "SDPA_MATH"


def test_layer_list_binds_requests_and_automatic_choice_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = (AttentionBackendEnum.REFERENCE,)
    assert get_attn_backend(64, torch.float32, only).get_name() == "REFERENCE"
    with use_backend("sdpa_math"), pytest.raises(Unsupported, match="supported_attention_backends"):
        get_attn_backend(64, torch.float32, only)
    global_force_attn_backend("sdpa_math")
    with pytest.raises(Unsupported):
        get_attn_backend(64, torch.float32, only)
    global_force_attn_backend(None)
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa_math")
    with pytest.raises(Unsupported):
        get_attn_backend(64, torch.float32, only)
    assert get_attn_backend(64, torch.float32).get_name() == "SDPA_MATH"


def test_the_same_choice_is_the_same_class() -> None:
    assert get_attn_backend(64, torch.float32) is get_attn_backend(64, torch.float32)


def test_wrong_head_sizes_and_dtypes() -> None:
    for head_size in (0, -1, 2.5, "64", True):
        with pytest.raises(InvalidProblem, match="head_size"):
            get_attn_backend(head_size, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(InvalidProblem, match="dtype"):
        get_attn_backend(64, torch.int32)


def test_impl_metadata_and_builder_compute() -> None:
    cls = get_attn_backend(16, torch.float32, ["SDPA_FLASH"])
    impl = cls.get_impl_cls()(4, 16, 0.3, True, 2)
    q, kv = torch.randn(2, 6, 4, 16), torch.randn(2, 9, 2, 16)
    metadata = cls.get_builder_cls()().build(current_timestep=3)
    assert isinstance(metadata, cls.get_metadata_cls()) and metadata.current_timestep == 3
    with record_selections() as ran:
        out = impl.forward(q, kv, kv, metadata)
    assert ran[0].backend == "sdpa_flash"
    expected = attention(q, kv, kv, mask=Causal(), scale=0.3, backend="reference")
    torch.testing.assert_close(out, expected)


def test_impl_refuses_typos_and_other_shapes() -> None:
    cls = get_attn_backend(16, torch.float32)
    with pytest.raises(InvalidProblem, match=r"dropout_rate=0.1.*'dropout_p'"):
        cls.get_impl_cls()(4, 16, 0.3, dropout_rate=0.1)
    with pytest.raises(InvalidProblem, match="heads"):
        cls.get_impl_cls()(4, 16, 0.3, num_kv_heads=3)
    with pytest.raises(InvalidProblem, match="current_timestep"):
        cls.get_builder_cls()().build(curent_timestep=1)
    with pytest.raises(InvalidProblem, match="expected"):
        cls.get_impl_cls()(3, 16).forward(Q, Q, Q)


def test_members_of_other_enumerations_go_by_their_names() -> None:
    group = (FastVideoEnum.TORCH_SDPA,)
    assert get_attn_backend(64, torch.float32, group).get_name().startswith("SDPA_")
    assert get_attn_backend(64, torch.float32, [DottedEnum.FLEX]).get_name() == "FLEX"
    assert get_attn_backend(64, torch.float32, [DottedEnum.SDPA_MATH]).get_name() == "SDPA_MATH"
    global_force_attn_backend(FastVideoEnum.TORCH_SDPA)
    assert get_global_forced_attn_backend() is AttentionBackendEnum.TORCH_SDPA
    with use_backend(DottedEnum.SDPA_MATH):
        assert use_backend.current().names == ("sdpa_math",)
    with use_backend(never=AttentionBackendEnum.SDPA_MATH):
        assert use_backend.current().never == ("sdpa_math",)


@pytest.mark.parametrize("name", ["FLASH_ATTN", FastVideoEnum.FLASH_ATTN, "flash-attn", "FA3"])
def test_names_of_the_field_without_a_backend_say_what_is_near(name: object) -> None:
    for ask in (
        lambda: global_force_attn_backend(name),
        lambda: use_backend(name),
        lambda: attention(Q, Q, Q, backend=name),
        lambda: get_attn_backend(64, torch.float32, requested=name),
        lambda: get_attn_backend(64, torch.float32, [name]),
    ):
        with pytest.raises(UnknownBackend, match=r"of the field.*'sdpa_flash' or 'sdpa_cudnn'"):
            ask()
    assert get_global_forced_attn_backend() is None
    assert backend_name_to_enum("FLASH_ATTN") is None


@pytest.mark.parametrize("name", ["SAGE_ATTN_THREE", "VIDEO_SPARSE_ATTN", "NO_ATTENTION"])
def test_what_the_field_means_is_said(name: str) -> None:
    meaning = {"SAGE": "quantised", "VIDE": "BlockMap.*'flex'", "NO_A": "no attention"}[name[:4]]
    with pytest.raises(UnknownBackend, match=meaning):
        global_force_attn_backend(name)


def test_a_layer_may_also_list_what_is_not_here() -> None:
    every = tuple(FastVideoEnum)
    assert get_attn_backend(64, torch.float32, every).get_name().startswith("SDPA_")
    listed = ["FLASH_ATTN", "VMOBA_ATTN", "SDPA_MATH"]
    assert get_attn_backend(64, torch.float32, listed).get_name() == "SDPA_MATH"
    with pytest.raises(UnknownBackend, match="sdpa_math"):
        get_attn_backend(64, torch.float32, ["FLASH_ATTN", "SDPA_MAHT"])
    with pytest.raises(UnknownBackend, match="SAGE_ATTN"):
        get_attn_backend(64, torch.float32, (FastVideoEnum.SAGE_ATTN, FastVideoEnum.FLASH_ATTN))


def test_default_backend_is_preferred_where_nothing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(**options: object) -> str:
        return get_attn_backend(64, torch.float32, **options).get_name()  # type: ignore[arg-type]

    group = (AttentionBackendEnum.TORCH_SDPA, AttentionBackendEnum.REFERENCE)
    assert named(default_backend=None) == named()
    assert named(default_backend=AttentionBackendEnum.REFERENCE) == "REFERENCE"
    choice = explain_attn_backend(64, torch.float32, group, "reference")
    assert (choice.source, choice.reason) == ("HEURISTIC", "the layer's default_backend")
    with use_backend("sdpa_math"):
        assert named(default_backend="reference") == "SDPA_MATH"
    with use_backend(never="reference"):  # a preference does not go against a wish
        assert named(default_backend="reference") != "REFERENCE"
    assert named(default_backend="reference", requested="sdpa_math") == "SDPA_MATH"
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa_math")
    assert named(default_backend="reference") == "SDPA_MATH"
    monkeypatch.delenv("POLYATTN_BACKEND")
    with pytest.raises(UnknownBackend, match=r"default_backend.*'reference'"):
        named(default_backend="refrence")


@pytest.mark.parametrize("default", ["FLASH_ATTN", FastVideoEnum.FLASH_ATTN, "sdpa_cudnn", "flex"])
def test_a_default_that_cannot_run_is_recorded_and_passed_over(default: object) -> None:
    options = (64, torch.float32, ["sdpa_math"], default)
    assert get_attn_backend(*options).get_name() == "SDPA_MATH"
    name = getattr(default, "name", str(default)).lower()
    choice = explain_attn_backend(*options)
    assert "got" in str(choice.decisions[name]) and choice.to_dict()["decisions"][name]["reasons"]


def test_a_fallback_comes_to_the_default() -> None:
    with use_backend("sdpa_cudnn", on_unsupported="fallback"):
        choice = explain_attn_backend(64, torch.float32, None, "reference")
    assert choice.backend == "reference" and choice.fallback and "sdpa_cudnn" in choice.fallback


def test_requested_is_the_request_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", "flex")

    def choice(requested: object) -> tuple[str, str]:
        found = explain_attn_backend(64, torch.float32, requested=requested)
        return found.backend, str(found.source)

    with use_backend("reference"):
        assert choice("sdpa_math") == ("sdpa_math", "CALL")
        assert choice(["sdpa_cudnn", "sdpa_math"]) == ("sdpa_math", "CALL")
        assert choice(NO_REQUEST) == ("reference", "SCOPE")
        assert choice(None)[1] in ("HEURISTIC", "TUNED")  # automatic, whatever is around
    assert choice(NO_REQUEST) == ("flex", "ENV")
    with pytest.raises(Unsupported, match="supported_attention_backends"):
        get_attn_backend(64, torch.float32, ["flex"], requested="sdpa_math")
    global_force_attn_backend("sdpa_math")
    assert choice("reference") == choice(None) == ("sdpa_math", "FORCED")


def test_head_sizes_of_numpy() -> None:
    cls = get_attn_backend(np.int64(16), torch.float32)  # type: ignore[arg-type]
    impl = cls.get_impl_cls()(np.int32(2), np.int64(16), num_kv_heads=np.int64(2))
    assert impl.forward(Q, Q, Q).shape == Q.shape


def test_the_module_attribute_cannot_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    selector.forced_attn_backend = AttentionBackendEnum.REFERENCE
    assert get_global_forced_attn_backend() is AttentionBackendEnum.REFERENCE
    assert selector.forced_attn_backend is AttentionBackendEnum.REFERENCE
    assert explain(Q, Q, Q).source == "FORCED"
    global_force_attn_backend("sdpa_math")
    assert selector.forced_attn_backend is AttentionBackendEnum.SDPA_MATH
    with pytest.raises(UnknownBackend):
        selector.forced_attn_backend = "nonesuch"
    assert selector.forced_attn_backend is AttentionBackendEnum.SDPA_MATH
    with monkeypatch.context() as patch:
        patch.setattr(selector, "forced_attn_backend", AttentionBackendEnum.FLEX)
        assert get_global_forced_attn_backend() is AttentionBackendEnum.FLEX
    assert get_global_forced_attn_backend() is AttentionBackendEnum.SDPA_MATH
    with pytest.raises(AttributeError):
        del selector.forced_attn_backend
    selector.forced_attn_backend = None
    assert explain(Q, Q, Q).source != "FORCED"


def _ran(backend: type[AttentionBackend], **options: float) -> str:
    with record_selections() as ran:
        backend.get_impl_cls()(2, 16, **options).forward(Q, Q, Q)
    return ran[0].backend


def test_a_call_that_the_chosen_cannot_run_goes_to_the_next_of_the_layer() -> None:
    group = (FastVideoEnum.FLASH_ATTN, FastVideoEnum.TORCH_SDPA)
    sdpa = get_attn_backend(16, torch.float32, group)
    assert sdpa.get_name() == "SDPA_FLASH"
    assert _ran(sdpa) == "sdpa_flash"
    assert _ran(sdpa, dropout_p=0.5) == "sdpa_math"
    anything = get_attn_backend(16, torch.float32)
    assert _ran(anything, dropout_p=0.5) == "sdpa_math"
    with pytest.raises(Unsupported, match="dropout"):
        _ran(get_attn_backend(16, torch.float32, ["sdpa_flash"]), dropout_p=0.5)
    with use_backend(never="sdpa_math"):
        other = get_attn_backend(16, torch.float32, group)
    with pytest.raises(Unsupported, match="dropout"):
        _ran(other, dropout_p=0.5)


def test_a_request_stays_strict_in_the_calls_of_a_layer() -> None:
    for strict in (
        get_attn_backend(16, torch.float32, requested="sdpa_flash"),
        get_attn_backend(16, torch.float32, ["sdpa_math", "sdpa_flash"], requested="sdpa_flash"),
    ):
        with pytest.raises(Unsupported, match="dropout"):
            _ran(strict, dropout_p=0.5)
    with use_backend(FastVideoEnum.TORCH_SDPA):
        group = get_attn_backend(16, torch.float32)
    assert _ran(group, dropout_p=0.5) == "sdpa_math"
    with use_backend("sdpa_flash", "reference"):
        two = get_attn_backend(16, torch.float32, [AttentionBackendEnum.TORCH_SDPA])
    with pytest.raises(Unsupported, match="dropout"):  # reference is not in the layer's list
        _ran(two, dropout_p=0.5)


def test_a_layer_with_several_backends_in_compiled_code() -> None:
    impl = get_attn_backend(16, torch.float32).get_impl_cls()(2, 16)
    assert impl.others
    compiled = torch.compile(impl.forward, fullgraph=True, backend="eager")
    with record_selections() as ran:
        out = compiled(Q, Q, Q)
    torch.testing.assert_close(out, attention(Q, Q, Q))
    assert ran[0].backend == impl.backend_name
