"""The pool of a machine: who holds which of its virtual IPUs, for all users and without a daemon.

Others use `pool`, whose methods take and return values; each is one transaction. The values are `records` (leases
and partitions) and `requests` (what a job wants, and why it does not get it); `clusters` tells what there is to
hand out. Inside, `place` opens the folder and sees that it can be trusted, `folder` reads, writes and locks its
files safely, `contents` is what stands in them, and `holders` tells whether the process of a lease still lives.
"""
