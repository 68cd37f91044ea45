"""polyattn for JAX: how its configuration stands is in ``polyattn.jax.flags``.

>>> from polyattn.jax import flags
>>> flags.snapshot()["polyattn.flags"]["framework"]
'jax'
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("jax") is None:
    from polyattn.errors import MissingDependency

    raise MissingDependency(
        "got an import of polyattn.jax without JAX, expected jax >= 0.7: "
        "pip install 'polyattn[jax]'"
    )

__all__: list[str] = []
