"""Records of one kind of processor have a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyattn.bench.machine import machine_class, processor_name

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = sorted(RESULTS.glob("*/*.json"))
EPYC = {"cpu": "AMD EPYC", "vendor": "AuthenticAMD", "cores": 2}
FLAGS = ["avx2", "avx512_bf16", "avx512f"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_record_lies_in_the_folder_of_its_machine(path: Path) -> None:
    machine = json.loads(path.read_text("utf-8")).get("machine")
    if machine is None or "family" not in machine:
        pytest.skip("it does not name the processor's family")
    assert machine_class(machine) == path.parent.name


def test_two_processors_of_one_name_and_one_instruction_set_are_two() -> None:
    zen4, zen5 = ({**EPYC, "family": family, "flags": FLAGS} for family in (25, 26))
    assert machine_class(zen4) != machine_class(zen5)
    assert processor_name(zen4) == "AMD EPYC" and processor_name(zen5) == "AMD EPYC Zen 5"
