"""The facts of one call, and every rule on its arguments; plain numbers, no framework.

`problem`: the facts. `admission`: whether a call is a call, for every way into it. `machine`,
`processor`: what is known of the device, its instruction sets and its packages.
"""

from polyattn.problem.problem import CODES as CODES
from polyattn.problem.problem import DEMANDS as DEMANDS
from polyattn.problem.problem import DTYPES as DTYPES
from polyattn.problem.problem import LAYOUTS as LAYOUTS
from polyattn.problem.problem import MaskFacts as MaskFacts
from polyattn.problem.problem import Problem as Problem
from polyattn.problem.problem import rounded_up as rounded_up
