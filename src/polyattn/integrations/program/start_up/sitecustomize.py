"""What every Python of a program runs first, this folder being in PYTHONPATH; then the user's own.

Read by any Python that the program starts, old ones too. It imports nothing of polyattn.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.environ.get("POLYATTN_RUN", "")

if sys.version_info >= (3, 11) and os.path.isdir(_FOLDER):
    import polyattn_start_up  # type: ignore[import-not-found]  # it is beside this file

    polyattn_start_up.begin(_FOLDER)

# The program's own path, and its own sitecustomize where it has one: as without us.
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore  # noqa: E402, F401 - without one, site expects the error
