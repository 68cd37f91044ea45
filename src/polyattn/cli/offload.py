"""``polyattn offload``: what of a model would stream and how long a pass takes; what came of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polyattn.cli.arguments import number, parser
from polyattn.cli.printing import emit_json
from polyattn.errors import MissingDependency, OffloadError, near_matches

__all__ = ["main"]

SUMMARY = """The plan of layerwise offload for a model in safetensors files, not loaded: what
stays, what streams, the peak, and the time of a pass beside what cannot be beaten."""

SHOWN = """What came of an offload: what handle.report().save(FILE) wrote, as a table or, with
--html, as a page with the copies and computations of the last passes drawn over time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print and store a plan; returns 0, or 2 if there is none."""
    arguments = list(argv or ())
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] not in _ACTIONS:
        raise OffloadError(
            f"got {arguments[0]!r}, expected one of {', '.join(_ACTIONS)}."
            f"{near_matches(arguments[0], _ACTIONS)}"
        )
    return _ACTIONS[arguments[0]](arguments[1:])


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    made = parser("offload plan", SUMMARY)
    made.add_argument("weights", metavar="WEIGHTS", help="a safetensors file, or a model's folder")
    made.add_argument("--budget", required=True, help="memory of the device, as 8GiB")
    devices = ("cuda", "xpu", "cpu")
    made.add_argument(
        "--device", choices=devices, default="cuda", help="where it computes: cuda or cpu (cuda)"
    )
    made.add_argument("--tier", choices=("host", "disk"), help="where weights stream from")
    made.add_argument("--depth", type=_count, help="units fetched ahead (the best of 1, 2, 3)")
    made.add_argument("--rate", help="of copies, as 25GB/s; from a disk it is measured")
    made.add_argument(
        "--tokens", type=_count, help="of a pass; with --tflops the time is predicted"
    )
    made.add_argument(
        "--tflops", type=number("TFLOP/s", 1e-6), help="that the device reaches in matrix products"
    )
    made.add_argument("--activations", default="0", help="memory of a pass beside the weights")
    made.add_argument("--other", default="0", help="what the process holds on the device already")
    made.add_argument("--out", metavar="FILE", help="store the plan, for offload(plan=FILE)")
    return made.parse_args(argv)


def _count(text: str) -> int:
    """Read a number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer from 1")
    return int(text)


def _rate(text: str | None) -> float | None:
    from polyattn.hooks.layerwise_offload.sizes import read_bytes

    if text is None:
        return None
    rate = read_bytes(text, "--rate")
    if rate < 1:
        raise OffloadError(f"got --rate={text!r}, expected bytes a second such as 25GB/s")
    return float(rate)


def _plan(argv: Sequence[str]) -> int:
    options = _arguments(argv)
    try:
        from polyattn.hooks.layerwise_offload import make_plan
        from polyattn.hooks.layerwise_offload.checkpoint_facts import (
            facts_of_checkpoint,
            measured_rate,
        )
        from polyattn.hooks.layerwise_offload.safetensors_files import SafetensorsFiles
        from polyattn.hooks.layerwise_offload.sizes import read_bytes
    except ImportError as error:
        raise MissingDependency("got `offload plan` without PyTorch, expected torch") from error
    tier = options.tier or ("disk" if options.device == "cpu" else "host")
    files = SafetensorsFiles(Path(options.weights))
    try:
        flops = options.tflops * 1e12 if options.tflops else None
        facts = facts_of_checkpoint(files, tokens=options.tokens, flops=flops)
        rate = _rate(options.rate)
        if rate is None and tier == "disk":
            rate = measured_rate(files)
    finally:
        files.close()
    facts = replace(
        facts,
        rates={tier: rate} if rate else {},
        activation_bytes=read_bytes(options.activations, "--activations"),
        other_bytes=read_bytes(options.other, "--other"),
    )
    budget = read_bytes(options.budget, "--budget")
    plan = make_plan(facts, device=options.device, budget=budget, tier=tier, depth=options.depth)
    if options.out:
        plan.save(options.out)
    if options.json:
        emit_json(json.loads(plan.to_json()), options.json)
    else:
        print(plan)
        if options.out:
            print(f"plan: {options.out}")
    return 0


def _show(argv: Sequence[str]) -> int:
    made = parser("offload show", SHOWN)
    made.add_argument("report", metavar="REPORT.json", help="of handle.report().save")
    made.add_argument("--html", metavar="FILE", help="write a page to look at")
    options = made.parse_args(argv)
    try:
        from polyattn.hooks.layerwise_offload import OffloadReport
    except ImportError as error:
        raise MissingDependency("got `offload show` without PyTorch, expected torch") from error
    report = OffloadReport.load(options.report)
    if options.html:
        from polyattn.report.offload import write_page

        write_page(report, options.html)
    if options.json:
        emit_json(json.loads(report.to_json()), options.json)
    else:
        print(report)
        if options.html:
            print(f"page: {options.html}")
    return 0


_ACTIONS = {"plan": _plan, "show": _show}
_USAGE = """usage: polyattn offload ACTION ...   (polyattn offload ACTION --help says more)

  plan WEIGHTS --budget BYTES   what would stream, the peak, and the time of a pass
  show REPORT.json              what came of it, as a table or a page"""
