"""A process that examines the models it is told, one line in, one line out.

``python -m polyattn.bench.models.child MODULE MEMORY_MIB``: a name a line on the standard input, a
row a line, as JSON, on the standard output. What libraries print goes to the standard error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib import import_module

from polyattn.bench.models.model_row import Row

__all__ = ["main"]


def main() -> int:
    """Read names until the input ends."""
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, memory = sys.argv[1], int(sys.argv[2])
    if memory:
        bytes_of_it = memory << 20
        resource.setrlimit(resource.RLIMIT_AS, (bytes_of_it, bytes_of_it))
    vars(import_module("huggingface_hub.constants"))["HF_HUB_OFFLINE"] = True  # no downloads
    examine = import_module(module).examine
    for line in sys.stdin:
        begin = time.monotonic()
        name = line.strip()
        try:
            row = examine(name)
        except Exception as error:  # what no library foresaw of its models
            row = Row(
                name, "crashed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]
            )
        row.seconds = round(time.monotonic() - begin, 2)
        print(json.dumps(row.to_json()), file=told, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
