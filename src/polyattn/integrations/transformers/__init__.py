"""transformers' models on polyattn's kernels: ``attn_implementation="polyattn"``.

>>> from polyattn.integrations.transformers import register
>>> register()

From then on the name is known: when a model is loaded, to ``model.set_attn_implementation``, and
by parts of a model. What a model hides arrives as a mask of polyattn, not as a tensor; soft cap,
sinks, grouped heads and biases arrive as they are. See ``docs/transformers.md``.
"""

from __future__ import annotations

from polyattn.integrations.transformers.registration import is_registered, register, unregister

__all__ = ["is_registered", "register", "unregister"]
