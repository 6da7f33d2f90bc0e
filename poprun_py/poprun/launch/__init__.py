"""How processes are started: the launchers, and the two small programs between an MPI runtime and the user's.

The runtime starts the *shim*, and may kill it at any time (Hydra's proxy SIGKILLs its children when mpiexec dies,
so a child that must clean up may not be one of them). The shim forks the *agent* into a session of its own; the
agent outlives it, is the program's parent, and ends the program's whole tree in order. Both are cheap to start:
a bare interpreter, the standard library, no packages. On one machine the runtime's children are *rank shims*, and
the *host shim* forks the agents of all.
"""
