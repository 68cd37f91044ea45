"""How many threads read from a disk: measured, part of the plan, the same bytes by any number."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from polyattn.errors import OffloadError
from polyattn.hooks import OffloadPlan, offload
from polyattn.hooks.layerwise_offload import Facts, mapped, measure_pass
from polyattn.hooks.layerwise_offload.devices.host import HostCarrier, Reader
from polyattn.hooks.layerwise_offload.mapped import FilePart, MappedFile, Mapping
from tests.hooks.layerwise_offload.small_models import frozen, inputs

X = inputs()


@pytest.mark.parametrize("chosen", [0, 1])
def test_the_number_by_which_a_pass_is_shorter_is_kept(
    chosen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes took is set, all else runs: a plan reads by the number that was faster."""
    carrier = HostCarrier()
    choices = carrier.readers
    wanted = choices[min(chosen, len(choices) - 1)]
    met = measure_pass._met

    def by_number(engine: object, run: object, facts: Facts, tier: str) -> tuple[float, Facts]:
        seconds = 1.0 if facts.readers == wanted else 2.0
        return seconds, met(engine, run, facts, tier)[1]  # type: ignore[arg-type]

    monkeypatch.setattr(measure_pass, "_met", by_number)
    want = frozen()(X)
    model = frozen()
    with offload(model, device=carrier, disk=tmp_path, sample=X) as handle:
        assert handle.plan.readers == wanted
        assert OffloadPlan.from_json(handle.plan.to_json()) == handle.plan
        assert torch.equal(model(X), want)
        assert carrier._reader.threads == wanted
        assert ("by 2 threads" in str(handle.plan)) is (wanted == 2)


def test_what_is_not_clearly_shorter_changes_nothing() -> None:
    one, two = Facts([], readers=1), Facts([], readers=2)
    assert measure_pass._fastest([(1.0, one), (0.98, two)])[1] is one
    assert measure_pass._fastest([(1.0, one), (0.90, two)])[1] is two
    assert measure_pass._fastest([(0.0, one), (0.0, two)])[1] is one  # no pass was seen as a whole


def test_a_plan_says_how_many(tmp_path: Path) -> None:
    model, want = frozen(), frozen()(X)
    with offload(model, device="cpu", disk=tmp_path) as handle:
        plan = handle.plan
        assert plan.readers == 0  # nothing was measured
        assert torch.equal(model(X), want)
    carrier = HostCarrier()
    with offload(model, device=carrier, disk=tmp_path, plan=replace(plan, readers=3)):
        assert torch.equal(model(X), want)
        assert carrier._reader.threads == 3


def test_a_reader_that_is_told_another_number_finishes_what_it_was_asked_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bytes"
    content = os.urandom((20 << 20) + 5)
    path.write_bytes(content)
    file, reader = MappedFile(path), Reader()
    memory = [bytearray(len(content) - 3) for _ in range(4)]
    part = FilePart(file, 3, len(content) - 3)
    readings = []
    for threads, into in zip((2, 1, 4, 3), memory, strict=True):
        reader.use(threads)
        assert reader.threads == threads
        readings.append(reader.read([(part, memoryview(into))]))
    for reading, into in zip(readings, memory, strict=True):
        reading.result()
        assert bytes(into) == content[3:]
    reader.close()
    file.close()


def test_where_no_file_descriptor_is_left_their_limit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4096))
    file = MappedFile(path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(mapped.mmap, "mmap", full)
    with pytest.raises(OffloadError, match="ulimit -n"):
        Mapping(file, 0, 4096)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OffloadError, match="ulimit -n"):
        MappedFile(path)
    file.close()
