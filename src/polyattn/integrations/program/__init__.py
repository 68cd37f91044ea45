"""A whole program with all its processes: what each asked of attention, and all of them together.

Nothing in here imports torch before the program does. `start_up` is what Python itself runs in each
process, `this_process` what begins there once torch is imported, `ledger` the file in which that
process's calls are counted, and `fragments` puts the files of all processes together.
"""
