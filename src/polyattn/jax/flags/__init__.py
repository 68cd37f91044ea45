"""How JAX is set: one table of its options, snapshots of them, and what differs between two.

JAX has its own ways to set them (``jax.config.update``, and context managers for a thread), which
are right under nesting and exceptions; polyattn adds what is missing, which is to see all of them
at once and to keep that with a result. Values are those that this thread sees. Reading changes
nothing and starts no backend.

>>> import jax
>>> from polyattn.jax.flags import diff, snapshot
>>> before = snapshot()
>>> with jax.default_matmul_precision("float32"):
...     diff(before, snapshot())
{'jax_default_matmul_precision': (None, 'float32')}
"""

from __future__ import annotations

from polyattn.flags import diff
from polyattn.jax.flags.reading import snapshot, table

__all__ = ["diff", "snapshot", "table"]
