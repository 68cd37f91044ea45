"""The backend selector by FastVideo's names: `polyattn.integrations.fastvideo.selector` itself."""

import sys

from polyattn.integrations.fastvideo import selector
from polyattn.integrations.fastvideo.selector import *  # noqa: F403 - for type checkers

sys.modules[__name__] = selector  # itself, since it answers and obeys assignments to attributes
