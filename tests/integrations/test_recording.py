import json

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F

from polyattn import TuningError
from polyattn.integrations.arrays_as_text import MOST_BYTES, StoredArray, take
from polyattn.integrations.recording import Recorder, read_record, write_record
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.selection import scopes


def recorded():
    recorder = Recorder()
    q = torch.randn(2, 4, 16, 8)
    mask = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    mask[1, ..., 9:] = False
    x = torch.randn(2, 16, 4, 8, requires_grad=True).transpose(1, 2)
    with route_sdpa(recorder):
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q, mask.expand(2, 1, 16, 16))
        F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
        F.scaled_dot_product_attention(q, q, q, torch.randn(16, 16))
        F.scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0])
    return recorder.record(["script.py"]), mask


def test_a_record_holds_calls_strides_masks_and_gradients(tmp_path):
    record, mask = recorded()
    padded, causal, biased = record.cases
    assert [case.calls for case in record.cases] == [3, 1, 1]
    assert padded.attn_mask.stored == (2, 1, 1, 16)
    assert torch.equal(padded.attn_mask.restore(), mask.expand(2, 1, 16, 16))
    assert causal.strides[0] == (512, 8, 32, 1)
    assert causal.needs_grad == (True, True, True)
    assert biased.problem.bias == "DenseBias(16x16, float32)"
    assert record.passed[0].calls == 1
    assert record.calls == 6
    write_record(record, tmp_path / "r.jsonl")
    assert read_record(tmp_path / "r.jsonl") == record


def test_growing_keys_do_not_grow_the_record():
    recorder = Recorder()
    with route_sdpa(recorder):
        for length in range(1, 65):
            q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, length, 8)
            F.scaled_dot_product_attention(q, k, k)
    record = recorder.record()
    assert record.calls == 64
    assert len(record.cases) <= 14


class Passing:
    """A listener that hears each call by itself, and hands it on."""

    def __init__(self, recorder):
        self.recorder, self.count = recorder, 0

    def ran(self, selection, call):
        self.count += 1
        self.recorder.ran(selection, call)

    def passed(self, reason, call):
        self.recorder.passed(reason, call)


def test_calls_of_a_class_are_recorded_as_they_would_be_one_by_one(monkeypatch):
    def program():
        torch.manual_seed(0)
        whole, mask = torch.randn(2, 4, 70, 8), torch.rand(2, 1, 1, 70) > 0.3
        for _ in range(2):
            for n in (5, 20, 33, 33, 34, 41, 70):
                q, k = torch.randn(2, 4, 1, 8), whole[:, :, :n]
                F.scaled_dot_product_attention(q, k, k)
                F.scaled_dot_product_attention(q, k, k, mask[..., :n])
                F.scaled_dot_product_attention(q.transpose(1, 2)[:, :, :1].mT.mT, k, k)
                F.scaled_dot_product_attention(q[0], k[0], k[0])
                q.requires_grad_()
                F.scaled_dot_product_attention(q, k, k)
                with torch.no_grad():
                    F.scaled_dot_product_attention(q, k, k)

    quick, each = Recorder(), Passing(Recorder())
    count = []
    ran = quick.ran_of_class
    monkeypatch.setattr(quick, "ran_of_class", lambda *call: (count.append(1), ran(*call)))
    for listener in (each, quick):
        scopes.invalidate()
        with route_sdpa(listener):
            program()
    mine, theirs = quick.record(), each.recorder.record()
    assert mine.calls == theirs.calls == 84 and each.count == 70
    assert len(count) >= 40
    assert mine == theirs


@pytest.mark.parametrize(
    "damage", ["cut", "foreign", "schema", "json", "problem", "mask", "bomb", "empty"]
)
def test_damaged_records_are_refused(tmp_path, damage):
    path = tmp_path / "r.jsonl"
    write_record(recorded()[0], path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if damage == "cut":
        lines.pop()
    elif damage == "foreign":
        lines[0]["application"] = "other"
    elif damage == "schema":
        lines[0]["schema"] = 99
    elif damage == "problem":
        lines[1]["problem"]["heads"] = -1
    elif damage == "mask":
        lines[1]["attn_mask"]["data"] = "AAAA"
    elif damage == "bomb":
        lines[1]["attn_mask"]["shape"] = lines[1]["attn_mask"]["stored"] = [1 << 20, 1 << 20]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    path.write_text(
        "" if damage == "empty" else text.replace("{", "", 1) if damage == "json" else text
    )
    with pytest.raises(TuningError, match="record"):
        read_record(path)


def test_a_missing_file_and_an_unwritable_one(tmp_path):
    with pytest.raises(TuningError):
        read_record(tmp_path / "none.jsonl")
    with pytest.raises(TuningError):
        write_record(recorded()[0], tmp_path / "no" / "folder.jsonl")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_arrays_come_back(dtype):
    array = (
        torch.randn(3, 1, 5, 7) > 0 if dtype == torch.bool else torch.randn(3, 1, 5, 7).to(dtype)
    )
    stored = StoredArray.from_dict(json.loads(json.dumps(take(array).to_dict())))
    assert torch.equal(stored.restore(), array)


def test_large_arrays_keep_their_density():
    array = torch.rand(2048, 4096) < 0.25
    stored = take(array)
    assert stored.data is None
    assert len(json.dumps(stored.to_dict())) < MOST_BYTES
    assert abs(float(stored.restore().float().mean()) - 0.25) < 0.01
