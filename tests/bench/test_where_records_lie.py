"""Records of one kind of processor have a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyattn.bench.machine import machine_class, processor_name

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MACHINES = {
    path: json.loads(path.read_text("utf-8")).get("machine", {})
    for path in RESULTS.glob("*/*.json")
}
RECORDS = sorted(path for path in MACHINES if "family" in MACHINES[path])  # older ones lack it
EPYC = {"cpu": "AMD EPYC", "vendor": "AuthenticAMD", "cores": 2}
FLAGS = ["avx2", "avx512_bf16", "avx512f"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_record_lies_in_the_folder_of_its_machine(path: Path) -> None:
    assert machine_class(MACHINES[path]) == path.parent.name


def test_two_processors_of_one_name_and_one_instruction_set_are_two() -> None:
    zen4, zen5 = ({**EPYC, "family": family, "flags": FLAGS} for family in (25, 26))
    assert machine_class(zen4) != machine_class(zen5)
    assert processor_name(zen4) == "AMD EPYC" and processor_name(zen5) == "AMD EPYC Zen 5"
