"""The pool of a machine: who holds which of its virtual IPUs, for all users and without a daemon.

Others use `pool`, whose methods take and return values; each is one transaction. The values are `records` (leases
and partitions), `requests` (what a job wants, and why it does not get it) and `server_messages` (both as JSON);
`clusters` tells what there is to hand out. Inside, `place` finds the file and sees that it can be trusted,
`database` reads and writes it, and `holders` tells whether the process behind a lease still lives.
"""
