r"""The activation trace of JAX programs: `tap` marks values, `trace` records them, also under jit.

The file is the one of every other framework (``docs/trace-format.md``), so a port to JAX is
compared with its torch original. How to use it is in ``docs/trace-jax.md``.

>>> import tempfile
>>> from pathlib import Path
>>> import jax, jax.numpy as jnp
>>> from polyattn.trace import read
>>> @jax.jit
... def model(params, x):
...     return tap(tap(x, "up", "in") @ params["up"]["weight"], "up")
>>> params = {"up": {"weight": jnp.ones((4, 4))}}
>>> path = Path(tempfile.mkdtemp(), "port.jsonl")
>>> with trace(path, params=params):
...     _ = model(params, jnp.ones((2, 4)))
>>> [(r.module, r.phase, r.tensor, r.mean) for r in read(path).records]
[('up', 'in', 'args[0]', 1.0), ('up', 'out', 'out', 4.0)]
"""

from polyattn.trace.recorders.jax.module_taps import tapped
from polyattn.trace.recorders.jax.program_trace import JaxTrace, trace
from polyattn.trace.recorders.jax.tap import tap

__all__ = ["JaxTrace", "tap", "tapped", "trace"]
