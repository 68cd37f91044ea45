"""From a problem to a backend: who asks, who can, who is preferred; imports no framework.

Who asks: `scopes`, `requests`. Who can: `capabilities`, `backend`, `registry`. Who is preferred:
`heuristics`, on the `evidence` of measured times. Two verbs: `select` weighs them and gives a
`Selection`; `prepare` has the kernel of a selection made, and gives a `Plan`.
"""

from polyattn.selection.selection import Accepted as Accepted
from polyattn.selection.selection import Decision as Decision
from polyattn.selection.selection import Rejected as Rejected
from polyattn.selection.selection import Selection as Selection
from polyattn.selection.selection import Source as Source
