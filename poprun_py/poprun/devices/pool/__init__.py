"""The pool of a machine: a folder that records which job uses which virtual IPU, for all users, without a daemon.

Other packages use `pool`, whose methods take and return values; each method is one transaction. `place` opens and
checks the folder, `folder` reads, writes and locks the files, and `contents` defines the contents of the files.
"""
