"""Importing polyattn changes nothing outside it: no frameworks, settings, handlers, output."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GENEROUS_SECONDS = 3.0


def in_new_process(code: str, folder: Path) -> dict:
    """Run the code in a fresh interpreter; it must print one line of JSON and nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, f"importing printed: {done.stdout}"
    return json.loads(lines[0])


def test_importing_the_core_is_inert(tmp_path: Path) -> None:
    seen = in_new_process(
        """
        import json, logging, os, signal, sys, time, warnings
        environment, handlers = dict(os.environ), list(logging.getLogger().handlers)
        limit, filters, hook = sys.getrecursionlimit(), list(warnings.filters), sys.excepthook
        interrupt = signal.getsignal(signal.SIGINT)
        start = time.perf_counter()
        import polyattn
        seconds = time.perf_counter() - start
        loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
        print(json.dumps({
            "frameworks": sorted({"torch", "jax", "numpy", "triton", "rich"} & sys.modules.keys()),
            "environment": dict(os.environ) == environment,
            "root handlers": logging.getLogger().handlers == handlers,
            "own handlers": [logger.name for logger in loggers if logger.name.startswith("polyattn")
                             and any(type(h) is not logging.NullHandler for h in logger.handlers)],
            "interpreter": (sys.getrecursionlimit(), warnings.filters, sys.excepthook,
                            signal.getsignal(signal.SIGINT)) == (limit, filters, hook, interrupt),
            "seconds": seconds,
        }))
        """,
        tmp_path,
    )
    assert seen.pop("seconds") < GENEROUS_SECONDS
    assert seen == {
        "frameworks": [],
        "environment": True,
        "root handlers": True,
        "own handlers": [],
        "interpreter": True,
    }
    assert list(tmp_path.iterdir()) == []


def test_importing_the_torch_part_changes_no_switch_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    seen = in_new_process(
        """
        import json, os, warnings
        import torch

        warnings.simplefilter("ignore")  # torch 2.9 warns of its own getters

        def switches():
            backends, cuda = torch.backends, torch.backends.cuda
            return {
                "flash": cuda.flash_sdp_enabled(),
                "efficient": cuda.mem_efficient_sdp_enabled(),
                "math": cuda.math_sdp_enabled(),
                "cudnn": cuda.cudnn_sdp_enabled(),
                "reduced": cuda.fp16_bf16_reduction_math_sdp_allowed(),
                "tf32": (cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
                "cudnn on": backends.cudnn.enabled,
                "cudnn mode": (backends.cudnn.benchmark, backends.cudnn.deterministic),
                "precision": torch.get_float32_matmul_precision(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "grad": torch.is_grad_enabled(),
                "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
                "dtype": str(torch.get_default_dtype()),
                "device": str(torch.get_default_device()),
                "seed": torch.initial_seed(),
                "random state": torch.get_rng_state().sum().item(),
                "sdpa": id(torch.nn.functional.scaled_dot_product_attention),
                "cuda started": torch.cuda.is_initialized(),
                "environment": dict(os.environ),
            }

        before = switches()
        import polyattn.torch
        after = switches()
        changed = [key for key in before if before[key] != after[key]]
        print(json.dumps({key: [before[key], after[key]] for key in changed}, default=str))
        """,
        tmp_path,
    )
    assert seen == {}
    assert list(tmp_path.iterdir()) == []
