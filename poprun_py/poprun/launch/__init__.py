"""How processes are started: the launchers, and the two small programs between an MPI runtime and the user's.

The runtime starts the *shim*, and may kill it at any time. So the shim forks the *agent* into a session of its
own, which outlives it and ends the program's whole tree in order. Both are bare interpreters with no packages. On
one machine the runtime's children are *rank shims*; the *host shim* forks the agents of all.
"""
