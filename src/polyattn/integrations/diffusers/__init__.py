"""diffusers' models on polyattn's kernels: ``model.set_attention_backend("polyattn")``.

>>> from polyattn.integrations.diffusers import register
>>> register()

From then on the name is one of diffusers' attention backends: for a model, in
``attention_backend("polyattn")``, and under its context parallelism. See ``docs/diffusers.md``.
"""

from __future__ import annotations

from polyattn.integrations.diffusers.dispatcher import is_registered, register, unregister

__all__ = ["is_registered", "register", "unregister"]
