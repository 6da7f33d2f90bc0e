"""Leases: the right of a job to use devices. The record of a machine's leases (the pool), and its server.

`pool` records which job uses which virtual IPU, for all users of a machine and without a daemon. `lease` acquires
the virtual IPUs of a job from the pools of its hosts, or from a server, before the job starts. `server` serves one
pool to other hosts. `poprun.plan` defines virtual IPUs and their clusters; this is pure.
"""
