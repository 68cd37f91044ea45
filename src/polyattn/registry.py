"""The registry of backends, where plugins import it from; it lives in `polyattn.selection`."""

from polyattn.selection.backend import Available as Available
from polyattn.selection.backend import Backend as Backend
from polyattn.selection.backend import Missing as Missing
from polyattn.selection.backend import Probe as Probe
from polyattn.selection.registry import Registry as Registry
from polyattn.selection.registry import register as register
from polyattn.selection.registry import registry as registry
