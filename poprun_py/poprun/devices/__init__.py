"""Leases of virtual IPUs: the pool of each machine, the leases that jobs acquire, and the server of a pool.

`pool` records which job uses which virtual IPU, for all users of a machine and without a daemon. `lease` acquires
the virtual IPUs of a job from the pools of its hosts, or from a server, before the job starts. `server` serves one
pool to other hosts. `poprun.plan` defines virtual IPUs and their clusters; this is pure.
"""
