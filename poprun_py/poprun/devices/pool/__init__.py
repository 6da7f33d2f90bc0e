"""The pool of a machine: who holds which of its virtual IPUs, for all users and without a daemon.

Others use `pool`, whose methods take and return values; each is one transaction. `place` opens the folder and sees
that it can be trusted, `folder` reads, writes and locks its files, `contents` is what stands in them.
"""
