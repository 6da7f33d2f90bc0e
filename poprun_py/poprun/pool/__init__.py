"""The pool of a machine: who holds which of its virtual IPUs, for all users and without a daemon.

Others use `pool`, whose methods take and return values; each is one transaction. The values are `records` (leases
and partitions), `requests` (what a job wants, and why it does not get it) and `server_messages` (both as JSON);
`clusters` tells what there is to hand out. Inside, `place` opens the folder and sees that it can be trusted,
`folder` reads, writes and locks its files safely, `rows` is what stands in one, `contents` what stands in all, and
`holders` tells whether the process behind a lease still lives.
"""
