"""The selector's API: every entity by the name its document gives it, on the one mechanism."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from polyattn import (
    Causal,
    InvalidProblem,
    UnknownBackend,
    Unsupported,
    record_selections,
    selector,
    use_backend,
)
from polyattn.registry import IN_TREE, registry
from polyattn.selector import (
    AttentionBackendEnum,
    backend_name_to_enum,
    get_attn_backend,
    get_env_variable_attn_backend,
    get_global_forced_attn_backend,
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
)
from polyattn.torch import attention

Q = torch.randn(1, 8, 2, 16)


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
    with pytest.raises(TypeError):
        cls.get_impl_cls()(4, 16, 0.3, dropout_rate=0.1)
    with pytest.raises(InvalidProblem, match="heads"):
        cls.get_impl_cls()(4, 16, 0.3, num_kv_heads=3)
    with pytest.raises(InvalidProblem, match="current_timestep"):
        cls.get_builder_cls()().build(curent_timestep=1)
    with pytest.raises(InvalidProblem, match="expected"):
        cls.get_impl_cls()(3, 16).forward(Q, Q, Q)
