"""The pool of a machine: who holds which of its virtual IPUs, for all users and without a daemon.

`records` and `wishes` hold the values, `clusters` chooses what there is to hand out, `refusals` words who has it.
`place` finds the file and sees that it can be trusted, `schema` opens it, `rows` reads and writes it, `holders`
knows whether the process behind a lease still lives. `pool` is what others use, with `waiting`: its methods take
values and return values, each is one transaction, and nothing outside this folder knows what a pool is kept in.
"""
