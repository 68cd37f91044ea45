"""``polyattn bench harm``: is the automatic choice ever slower than torch's own function?

`problems` lists what is timed, `calls` the ways a user would write each call, `run` times them and
judges, `report` prints; what checks the results and times the blocks is that of ``bench cpu``.
"""
