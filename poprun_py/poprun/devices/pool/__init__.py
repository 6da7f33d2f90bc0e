"""The pool of a machine: a folder of files that record which job uses which virtual IPU. There is no daemon.

Other packages use `pool`, whose methods take and return values; each method is one transaction. `place` opens and
checks the folder, `folder` reads, writes and locks the files, and `contents` defines the contents of the files.
"""
