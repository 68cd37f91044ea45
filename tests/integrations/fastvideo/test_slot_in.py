"""FastVideo's dense layers on polyattn, through its selector.

There is no FastVideo here: `selector_of_its_shape` has the few lines of its selector that are
replaced, with its names and its order of precedence. ``scripts/fastvideo_layers.py`` runs the real
one.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn import MissingDependency, Unsupported, record_selections, use_backend
from polyattn.integrations.fastvideo import slot_in

SELECTOR = """
import enum, functools, logging, os

logger = logging.getLogger("fastvideo")


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = enum.auto()
    TORCH_SDPA = enum.auto()
    SAGE_ATTN = enum.auto()
    VIDEO_SPARSE_ATTN = enum.auto()


def backend_name_to_enum(name):
    return AttentionBackendEnum.__members__.get(name)


def get_attn_backend(head_size, dtype, supported_attention_backends=None, default_backend=None, *,
                     requested=None):
    return _cached_get_attn_backend(
        head_size, dtype, supported_attention_backends, default_backend, requested=requested,
        env_backend=os.environ.get("FASTVIDEO_ATTENTION_BACKEND"), component=None,
        device_index=None,
    )


@functools.cache
def _cached_get_attn_backend(head_size, dtype, supported_attention_backends=None,
                             default_backend=None, *, requested=None, env_backend=None,
                             component=None, device_index=None):
    if not supported_attention_backends:
        raise ValueError("supported_attention_backends is empty")
    selected = requested
    if selected is None and env_backend is not None:
        selected = backend_name_to_enum(env_backend)
    if selected is None:
        selected = default_backend
    if selected is not None and selected not in supported_attention_backends:
        selected = default_backend if default_backend in supported_attention_backends else None
    return ("theirs", selected and selected.name)
"""


@pytest.fixture
def selector_of_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    home = tmp_path / "fastvideo" / "attention"
    home.mkdir(parents=True)
    for package in (home, home.parent):
        (package / "__init__.py").write_text("")
    (home / "selector.py").write_text(SELECTOR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("FASTVIDEO_ATTENTION_BACKEND", raising=False)
    yield
    slot_in.unregister()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastvideo"]:
        del sys.modules[name]


@pytest.fixture
def selector(selector_of_its_shape: None) -> Any:
    slot_in.register()
    return importlib.import_module(slot_in.HOME)


def _layer(
    selector: Any, *names: str, requested: str | None = None, default: str | None = None
) -> Any:
    kinds = selector.AttentionBackendEnum
    return selector.get_attn_backend(
        32, torch.float32, tuple(kinds[name] for name in names), default and kinds[default],
        requested=requested and kinds[requested],
    )  # fmt: skip


DENSE = ("FLASH_ATTN", "TORCH_SDPA")


def _ours(found: Any) -> bool:
    return hasattr(found, "get_impl_cls")


def test_registering_waits_is_once_and_is_undone(selector_of_its_shape: None) -> None:
    slot_in.register()
    slot_in.register()
    assert slot_in.is_registered() and slot_in.HOME not in sys.modules
    selector = importlib.import_module(slot_in.HOME)
    assert _ours(_layer(selector, *DENSE))
    slot_in.unregister()
    slot_in.unregister()
    assert not slot_in.is_registered()
    assert _layer(selector, *DENSE) == ("theirs", None)
    theirs = selector._cached_get_attn_backend
    slot_in.register()
    slot_in.register()
    assert _ours(_layer(selector, *DENSE))
    slot_in.unregister()
    assert selector._cached_get_attn_backend is theirs


def test_without_fastvideo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_in.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="got no package fastvideo"):
        slot_in.register()


def test_another_selector_is_refused_and_left_alone(selector_of_its_shape: None) -> None:
    selector = importlib.import_module(slot_in.HOME)
    selector._cached_get_attn_backend = theirs = lambda head_size, dtype: None  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match=r"takes \(head_size, dtype\), expected"):
        slot_in.register()
    assert selector._cached_get_attn_backend is theirs and not slot_in.is_registered()


@pytest.mark.parametrize(
    ("names", "asked", "ours"),
    [
        (DENSE, {}, True),
        (("TORCH_SDPA",), {}, True),
        ((*DENSE, "VIDEO_SPARSE_ATTN"), {}, True),
        (DENSE, {"requested": "TORCH_SDPA"}, True),
        (DENSE, {"default": "FLASH_ATTN"}, True),
        # not of this layer, so that FastVideo takes what it can
        (DENSE, {"requested": "VIDEO_SPARSE_ATTN"}, True),
        ((*DENSE, "VIDEO_SPARSE_ATTN"), {"requested": "VIDEO_SPARSE_ATTN"}, False),
        ((*DENSE, "VIDEO_SPARSE_ATTN"), {"default": "VIDEO_SPARSE_ATTN"}, False),
        ((*DENSE, "SAGE_ATTN"), {"requested": "SAGE_ATTN"}, False),
        (("VIDEO_SPARSE_ATTN",), {}, False),
    ],
)
def test_which_layers_are_ours(
    selector: Any, names: tuple[str, ...], asked: dict[str, str], ours: bool
) -> None:
    found = _layer(selector, *names, **asked)
    assert _ours(found) is ours
    if not ours:
        assert found == ("theirs", next(iter(asked.values()), None))


def test_its_variables_are_obeyed(selector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*DENSE, "SAGE_ATTN")
    monkeypatch.setenv("FASTVIDEO_ATTENTION_BACKEND", "SAGE_ATTN")
    assert _layer(selector, *names) == ("theirs", "SAGE_ATTN")
    assert _ours(_layer(selector, *names, requested="TORCH_SDPA"))
    monkeypatch.setenv("FASTVIDEO_ATTENTION_BACKEND", "FLASH_ATTN")
    assert _ours(_layer(selector, *names))
    monkeypatch.setenv("FASTVIDEO_NVFP4_FA4", "1")
    assert _layer(selector, *names) == ("theirs", "FLASH_ATTN")


def test_its_own_refusal_is_kept(selector: Any) -> None:
    with pytest.raises(ValueError, match="supported_attention_backends is empty"):
        _layer(selector)
    selector._cached_get_attn_backend.cache_clear()


def test_requests_of_polyattn_hold_and_a_request_of_fastvideo_is_a_preference(
    selector: Any,
) -> None:
    with use_backend("sdpa_math"):
        assert _layer(selector, *DENSE, requested="FLASH_ATTN").get_name() == "SDPA_MATH"
    assert _layer(selector, *DENSE, requested="TORCH_SDPA").get_name().startswith("SDPA_")


def _impl(selector: Any, **options: Any) -> Any:
    given = {"num_heads": 2, "head_size": 32, "softmax_scale": 0.2, "causal": False}
    return _layer(selector, *DENSE).get_impl_cls()(**(given | options))


def _sdpa(q: Any, k: Any, v: Any, **options: Any) -> Any:
    arrays = [x.transpose(1, 2) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(
        *arrays, scale=0.2, **options
    ).transpose(1, 2)


KEPT = torch.rand(2, 24, generator=torch.Generator().manual_seed(5)) < 0.7
TEXT = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
SHORT = torch.cat([torch.ones(2, 20, dtype=torch.bool), TEXT.bool()], 1)
ADDED = torch.randn(2, 1, 1, 4, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(
    ("mask", "read_as"),
    [
        (None, None),
        (KEPT, KEPT[:, None, None]),
        (TEXT, SHORT[:, None, None]),
        (TEXT[:, None], SHORT[:, None, None]),
        (ADDED, torch.nn.functional.pad(ADDED, (20, 0))),
    ],
)
def test_metadata_of_other_layers_kernels_is_read_for_its_mask(
    selector: Any, mask: Any, read_as: Any
) -> None:
    q, k, v = torch.randn(3, 2, 24, 2, 32)
    metadata = SimpleNamespace(
        current_timestep=3, VSA_sparsity=0.9, attn_mask=mask, tile_size=(4, 4, 4)
    )
    with record_selections() as ran:
        got = _impl(selector).forward(q, k, v, metadata)
    assert len(ran) == 1
    torch.testing.assert_close(got, _sdpa(q, k, v, attn_mask=read_as))


def test_causal(selector: Any) -> None:
    q, k, v = torch.randn(3, 2, 24, 2, 32)
    impl = _impl(selector, causal=True)
    torch.testing.assert_close(impl.forward(q, k, v, None), _sdpa(q, k, v, is_causal=True))
    with pytest.raises(Unsupported, match="24 queries and 9 keys"):
        impl.forward(q, k[:, :9], v[:, :9], None)


def test_a_mask_that_is_too_long_is_an_error(selector: Any) -> None:
    q = torch.randn(2, 8, 2, 32)
    with pytest.raises(ValueError, match="mask"):
        _impl(selector).forward(q, q, q, SimpleNamespace(attn_mask=KEPT))


def test_layers_can_be_pickled(selector: Any) -> None:
    q = torch.randn(2, 8, 2, 32)
    impl = _impl(selector, causal=True)
    again = pickle.loads(pickle.dumps(impl))
    assert type(again) is type(impl)
    torch.testing.assert_close(again.forward(q, q, q, None), impl.forward(q, q, q, None))
