"""``polyattn bench gpu``: torch's own function, our choice, and each backend, on a CUDA device.

`gpu_cases` lists what is timed, `gpu_run` checks, times and judges, `gpu_table` prints; the arrays
of a case and the truth about them are those of ``bench cpu``.
"""
