"""Weights in files: shared folders, the model's own files, and what may be wrong with them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file
from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload import own_files, without_weights
from polyattn.hooks.layerwise_offload.mapped import MappedFile
from polyattn.hooks.layerwise_offload.safetensors_files import header_of
from tests.hooks.layerwise_offload.small_models import Model, frozen, inputs

X = inputs()


def away(model: nn.Module, folder: Path, **given: Any) -> Any:
    return offload(model, device="cpu", disk=folder, **given)


def test_models_share_a_folder(tmp_path: Path) -> None:
    models = [frozen(seed) for seed in (1, 2, 1)]
    want = [model(X) for model in models]
    handles = [away(model, tmp_path) for model in models]
    assert len(list(tmp_path.glob("*.weights"))) == 12  # equal weights are one file
    for _ in range(2):
        for model, out in zip(models, want, strict=True):
            assert torch.equal(model(X), out)
    handles[0].detach()
    for model, out in zip(models, want, strict=True):
        assert torch.equal(model(X), out)
    for handle in handles:
        handle.detach()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_trusted_by_its_name(tmp_path: Path) -> None:
    with away(frozen(), tmp_path, keep_files=True):
        pass
    files = sorted(tmp_path.glob("*.weights"))
    files[0].write_bytes(bytes(files[0].stat().st_size))
    files[1].write_bytes(b"short")
    files[2].unlink()
    model = frozen()
    with away(model, tmp_path):
        assert torch.equal(model(X), frozen()(X))


def test_files_that_are_deleted_do_no_harm(tmp_path: Path) -> None:
    model = frozen()
    with away(model, tmp_path):
        for file in tmp_path.iterdir():
            file.unlink()
        assert torch.equal(model(X), frozen()(X))
    assert torch.equal(model(X), frozen()(X))


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model, reference = frozen(), frozen()
    with away(model, Path("weights")):
        monkeypatch.chdir("elsewhere")
        for each in (model, reference):
            each.blocks[1].up.weight.data.mul_(2)
        assert torch.equal(model(X), reference(X))
        assert list(Path.cwd().iterdir()) == []
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_folder_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    model, reference = frozen(), frozen()
    with away(model, tmp_path / "weights"):
        shutil.rmtree(tmp_path / "weights")
        for each in (model, reference):
            each.blocks[1].up.weight.data.mul_(2)
        assert torch.equal(model(X), reference(X))


def test_changed_weights_do_not_fill_the_disk(tmp_path: Path) -> None:
    model, reference = frozen(), frozen()
    with away(model, tmp_path):
        for _ in range(3):
            for each in (model, reference):
                each.blocks[1].up.weight.data.mul_(2)
            assert torch.equal(model(X), reference(X))
        assert len(list(tmp_path.glob("*.weights"))) == 6


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are not listed")
def test_a_model_that_is_dropped_leaves_no_file_open(tmp_path: Path) -> None:
    model = frozen()
    handle = away(model, tmp_path)
    model(X)
    del model, handle
    gc.collect()
    links = (os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    assert not [link for link in links if str(tmp_path) in link]


def test_files_that_are_written_to_are_an_error(tmp_path: Path) -> None:
    model = frozen()
    handle = away(model, tmp_path)
    model(X)
    with next(tmp_path.glob("*.weights")).open("r+b") as file:
        file.write(b"abcd")
    with pytest.raises(OffloadError, match="was written to"):
        model(X)
        model(X)
    with pytest.raises(OffloadError, match="was written to"):
        handle.detach()


def test_a_full_disk_leaves_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = own_files._each_chunk, []

    def full(layout: Any, segments: Any, take: Any) -> None:
        calls.append(1)
        if len(calls) == 6:  # while the third unit is written
            raise OSError(28, "No space left on device")
        real(layout, segments, take)

    model = frozen()
    addresses = {name: id(p) for name, p in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(own_files, "_each_chunk", full)
        with pytest.raises(OffloadError, match="No space left on device"):
            away(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert {name: id(p) for name, p in model.named_parameters()} == addresses
    assert torch.equal(model(X), frozen()(X))
    with away(model, tmp_path):
        assert torch.equal(model(X), frozen()(X))


def changed_in_a_scope(model: nn.Module, handle: Any) -> None:
    with handle.loaded("blocks.1"):
        model.blocks[1].up.weight.data.mul_(1.5)


def changed_by_the_count(model: nn.Module, handle: Any) -> None:
    with handle.loaded("blocks.1"):
        model.blocks[1].up.weight.mul_(1.5)


def changed_at_home(model: nn.Module, handle: Any) -> None:
    model.blocks[1].up.weight.data.mul_(1.5)
    model(X)


def replaced(model: nn.Module, handle: Any) -> None:
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data * 1.5
    model(X)


def replaced_in_a_scope(model: nn.Module, handle: Any) -> None:
    with handle.loaded("blocks.1"):
        model.blocks[1].up.weight.data = model.blocks[1].up.weight.data * 1.5


@pytest.mark.parametrize("ends", ["room", "detach"])
@pytest.mark.parametrize(
    "change",
    [changed_in_a_scope, changed_by_the_count, changed_at_home, replaced, replaced_in_a_scope],
)
def test_nothing_is_lost_on_a_full_disk(
    change: Any, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was changed waits in memory; the next call has it, or the model that is detached."""
    model, reference = frozen(), frozen()
    reference.blocks[1].up.weight.data.mul_(1.5)
    handle = away(model, tmp_path)
    model(X)
    with monkeypatch.context() as patch:
        patch.setattr(own_files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(OffloadError, match="1,000 bytes free"):
            change(model, handle)
        with pytest.raises(OffloadError, match="1,000 bytes free"):
            model(X)
        assert torch.equal(model.blocks[1].up.weight, reference.blocks[1].up.weight)
        if ends == "detach":
            handle.detach()
    assert torch.equal(model(X), reference(X))
    assert torch.equal(model(X), reference(X))
    handle.detach()
    assert torch.equal(model(X), reference(X))
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_known_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(own_files.shutil, "disk_usage", lambda folder: usage)
    model = frozen()
    with pytest.raises(OffloadError, match="1,000 bytes free"):
        away(model, tmp_path)
    assert torch.equal(model(X), frozen()(X))


def test_a_file_that_goes_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its maker detaches while another looks at it: it is written again."""
    first, second, real = away(frozen(), tmp_path), frozen(), own_files.MappedFile

    def opened(path: Path) -> Any:
        first.detach()
        return real(path)

    monkeypatch.setattr(own_files, "MappedFile", opened)
    with away(second, tmp_path):
        assert torch.equal(second(X), frozen()(X))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keeper_goes_first", [True, False])
def test_what_anybody_wants_to_keep_stays(tmp_path: Path, keeper_goes_first: bool) -> None:
    first, second = away(frozen(), tmp_path), away(frozen(), tmp_path, keep_files=True)
    for handle in (second, first) if keeper_goes_first else (first, second):
        handle.detach()
    assert len(list(tmp_path.glob("*.weights"))) == len(list(tmp_path.glob("*.json"))) == 6


def test_what_a_killed_process_left_is_taken_away(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom polyattn.hooks import offload\n"
        "from tests.hooks.layerwise_offload.small_models import frozen\n"
        f"handle = offload(frozen(seed=5), device='cpu', disk={str(tmp_path)!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    assert len(list(tmp_path.glob("*.weights"))) == 6
    with away(frozen(), tmp_path):
        assert len(list(tmp_path.glob("*.weights"))) == 6  # only ours
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_dead_processes_are_taken_away(tmp_path: Path) -> None:
    draft = tmp_path / f"{'0' * 64}.99999999-1.draft"
    draft.write_bytes(b"half")
    with away(frozen(), tmp_path):
        assert not draft.exists()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    values = {name: value.clone() for name, value in frozen().state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def on_meta() -> Model:
    with torch.device("meta"):
        return Model().eval().requires_grad_(False)


def test_a_model_that_was_never_in_memory(stored: Path) -> None:
    for weights in (stored, stored.parent, [stored]):
        model = on_meta()
        objects = [id(p) for p in model.parameters()]
        with offload(model, device="cpu", weights=weights) as handle:
            assert {unit.tier for unit in handle.plan.units} == {"disk"}
            for _ in range(2):
                assert torch.equal(model(X), frozen()(X))
            assert [id(p) for p in model.parameters()] == objects
        assert torch.equal(model(X), frozen()(X))
    assert sorted(file.name for file in stored.parent.iterdir()) == ["model.safetensors"]


def overwritten(path: Path, by: bytes) -> None:
    with path.open("r+b") as file:
        file.write(by)


USES = {
    "forward": lambda model, handle: model(X),
    "state_dict": lambda model, handle: model.state_dict(),
    "of a part": lambda model, handle: model.blocks[1].up.state_dict(),
    "deepcopy": lambda model, handle: copy.deepcopy(model),
    "save": lambda model, handle: torch.save(model, io.BytesIO()),
    "detach": lambda model, handle: handle.detach(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", ["written", "written, its time set back", "cut"])
def test_no_use_of_a_changed_file_is_silent(use: str, how: str, stored: Path) -> None:
    values = {name: value.clone() for name, value in frozen(seed=9).state_dict().items()}
    save_file(values, stored.parent / "other")
    model = on_meta()
    handle = offload(model, device="cpu", weights=stored)
    model(X)
    facts = stored.stat()
    if how == "cut":
        os.truncate(stored, 1000)
    else:
        overwritten(stored, (stored.parent / "other").read_bytes())
    if "back" in how:
        os.utime(stored, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(OffloadError, match="was written to"):
        USES[use](model, handle)
    if use != "detach":
        with pytest.raises(OffloadError, match="was written to"):
            handle.detach()
    assert not handle.attached
    assert all(p.is_meta for p in model.blocks.parameters())  # there are no values any more
    save_file(frozen().state_dict(), stored.parent / "again")
    with offload(model, device="cpu", weights=stored.parent / "again"):
        assert torch.equal(model(X), frozen()(X))


@pytest.mark.parametrize("use", ["deepcopy", "save", "state_dict", "detach"])
def test_units_that_stay_need_their_files_no_more(use: str, tmp_path: Path) -> None:
    model, reference = frozen(), frozen()
    with away(model, tmp_path) as handle:
        plan = handle.plan
    first, *others = plan.units
    first = dataclasses.replace(first, tier="resident")
    staying = dataclasses.replace(plan, units=(first, *others))
    with away(model, tmp_path, plan=staying) as handle:
        USES[use](model, handle)
        if use == "deepcopy":
            assert torch.equal(copy.deepcopy(model)(X), reference(X))
        assert torch.equal(model(X), reference(X))


def test_a_file_that_is_given_away_or_linked_is_the_same(stored: Path) -> None:
    model = on_meta()
    with offload(model, device="cpu", weights=stored):
        os.link(stored, stored.parent / "link")
        assert torch.equal(model(X), frozen()(X))
        stored.chmod(0o440)
        assert torch.equal(model(X), frozen()(X))
        stored.unlink()
        assert torch.equal(model(X), frozen()(X))


def test_weights_that_are_loaded_anew_do_not_need_their_file(stored: Path, tmp_path: Path) -> None:
    model = on_meta()
    with offload(model, device="cpu", weights=stored, disk=tmp_path / "own"):
        overwritten(stored, bytes(stored.stat().st_size))
        model.load_state_dict(frozen(seed=9).state_dict())
        assert torch.equal(model(X), frozen(seed=9)(X))
    assert torch.equal(model(X), frozen(seed=9)(X))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_that_was_never_in_memory(tied: bool, tmp_path: Path) -> None:
    """Its rotary frequencies are buffers that no file has."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    whole.save_pretrained(tmp_path)
    with without_weights():
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    assert all(p.is_meta for p in model.parameters())
    ids = torch.arange(3, 12)[None]
    with offload(model, device="cpu", weights=tmp_path):
        assert torch.equal(model(ids).logits, whole(ids).logits)
        mine, theirs = (m.generate(ids, max_new_tokens=4, do_sample=False) for m in (model, whole))
        assert torch.equal(mine, theirs)
    assert torch.equal(model(ids).logits, whole(ids).logits)
    with torch.device("meta"):
        lost = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    with pytest.raises(OffloadError, match="without_weights"):
        offload(lost, device="cpu", weights=tmp_path)


def test_several_files_with_an_index_and_a_prefix(tmp_path: Path) -> None:
    values = {f"model.{name}": value.clone() for name, value in frozen().state_dict().items()}
    names = sorted(values)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, its in files.items():
        save_file({name: values[name] for name in its}, tmp_path / file)
    index = {"weight_map": {name: file for file, its in files.items() for name in its}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = on_meta()
    with offload(model, device="cpu", weights=tmp_path):
        assert torch.equal(model(X), frozen()(X))


def test_what_is_in_memory_wins_over_a_file_of_its_name(stored: Path, tmp_path: Path) -> None:
    model, want = frozen(seed=7), frozen(seed=7)(X)
    with pytest.warns(UserWarning, match="other values in memory than in weights=") as warned:
        handle = offload(model, device="cpu", weights=stored, disk=tmp_path / "own")
    assert len(warned) == 1 and warned[0].filename == __file__
    with handle:
        assert torch.equal(model(X), want)
        assert len(list((tmp_path / "own").glob("*.weights"))) == 6
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning):
        offload(model, device="cpu", weights=stored, disk=tmp_path / "own")
    assert torch.equal(model(X), want)  # and nothing of it is put away
    model = frozen()
    with offload(model, device="cpu", weights=stored, disk=tmp_path / "own"):
        assert list((tmp_path / "own").glob("*.weights")) == []  # the model's own are used
        assert torch.equal(model(X), frozen()(X))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("blocks.3.up.weight"), r"1 tensors without values.*blocks\.3\.up\.weight"),
        (lambda v: v.update({"last.bias": v["last.bias"].double()}), "expected torch.float32"),
        (lambda v: v.update({"last.bias": v["last.bias"][:3]}), r"\(3,\), expected"),
    ],
)
def test_files_that_do_not_fit_the_model(tmp_path: Path, change: Any, message: str) -> None:
    values = {name: value.clone() for name, value in frozen().state_dict().items()}
    change(values)
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(OffloadError, match=message):
        offload(on_meta(), device="cpu", weights=tmp_path)


def test_weights_that_a_library_stores_otherwise_are_no_buffers_that_are_missing(
    tmp_path: Path,
) -> None:
    """transformers joins experts while it loads them: the file has other names."""
    values = {name: value.clone() for name, value in frozen().state_dict().items()}
    del values["blocks.3.up.weight"]
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(OffloadError, match=r"other names.*give disk=") as caught:
        offload(on_meta(), device="cpu", weights=tmp_path)
    assert "without_weights" not in str(caught.value)
    model = on_meta()
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(OffloadError, match=r"2 tensors.*other names.*; make .*without_weights"):
        offload(model, device="cpu", weights=tmp_path)


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        _file(b"{}", length=1 << 40),
        _file(b"no json"),
        _file([1, 2]),
        _file({"a": {"dtype": "F32", "shape": [2]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"12345678"),
        _file({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, b"12345678"),
        _file({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(OffloadError, match="no safetensors file"):
        header_of(MappedFile(path))


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="expected a folder"):
        away(frozen(), tmp_path / "file")
    with pytest.raises(OffloadError, match="without safetensors files"):
        offload(frozen(), device="cpu", weights=tmp_path)
    with pytest.raises(OffloadError, match="cannot be opened"):
        offload(frozen(), device="cpu", weights=tmp_path / "nothing.safetensors")
    with pytest.raises(OffloadError, match="expected disk="):
        offload(frozen(), device="cpu")
