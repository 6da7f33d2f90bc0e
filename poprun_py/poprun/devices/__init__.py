"""Who holds which virtual IPU: pools of machines, the leases that jobs take, and the server of a pool.

`pool` keeps who holds what, for all users of a machine and without a daemon. `lease` takes what a job needs from
the pools of its hosts, or from a server, before it starts. `server` hands out one pool to other hosts. What a
virtual IPU is, and which ones belong together, is pure and lies below, in `poprun.plan`.
"""
