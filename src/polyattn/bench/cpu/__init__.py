"""``polyattn bench cpu``: the kernel of our own beside torch's and others', in one run.

`cases` says what is timed and what the goals are; `inputs` makes the arrays, `ways` the calls,
`truth` checks their results, `repeats` times them, `yardsticks` says what the machine can do,
`memory` what a call needs. `polyattn.bench.harm` uses most of it for the automatic choice.
"""
