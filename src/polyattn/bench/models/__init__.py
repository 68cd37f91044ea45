"""``polyattn bench models``: every model of a library, built small, on its own attention and ours.

What a library's models are, how one is built and what comparing it means is that library's
business: a module with ``names()``, ``examine(name)`` and ``version()``, in :data:`LIBRARIES` of
`polyattn.bench.models.bench_models`. Here is what they share: a process for each few models, so
that one that crashes or never ends takes nothing with it, the judgement, the table and the record.
"""
