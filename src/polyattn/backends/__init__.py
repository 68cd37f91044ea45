"""One folder a kernel: what it declares, and its implementation for each framework.

``<kernel>/declared.py`` imports no framework: it registers what the kernel can run. Beside it are
``torch.py``, ``jax.py`` or ``numpy.py``, or folders of these names, which are imported when the
kernel is loaded. No kernel knows of another. A new one is a new folder here, and a row of
`polyattn.selection.heuristics` if it may be chosen by itself.
"""
