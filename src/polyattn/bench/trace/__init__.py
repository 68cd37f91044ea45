"""``polyattn bench trace``: whether the trace names what is wrong, and what recording costs.

`faults` seeds bugs of many kinds into real models and counts who is named; `overhead` times a
forward with and without a record. `command` is the command line of both.
"""
