"""The file of a trace: its header and records, what writes them and what reads them.

No framework is needed. The format is in ``docs/trace-format.md``.
"""
