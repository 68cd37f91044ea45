"""The registry of backends, where plugins import it from; it lives in `polyattn.selection`."""

from polyattn.selection.backend import Available, Backend, Missing, Probe
from polyattn.selection.registry import FRAMEWORKS, IN_TREE, Registry, register, registry

__all__ = [
    "FRAMEWORKS", "IN_TREE", "Available", "Backend", "Missing", "Probe", "Registry", "register",
    "registry",
]  # fmt: skip
