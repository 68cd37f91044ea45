"""``polyattn bench trace``: whether the trace names what is wrong, and what recording costs.

`overhead` times a forward with and without a record. The bugs that are seeded into real models, and
who is named for them, are no part of the package: ``benchmarks/faults`` of a checkout. `command` is
the command line of both.
"""
