"""The start of processes: the launchers, and two small programs between an MPI runtime and the user's program.

The runtime starts the *shim*, and may kill the shim at any time. So the shim forks the *agent* into a new session.
The agent outlives the shim and ends the program's whole process tree in order. Both are bare interpreters without
packages. On one machine the runtime's children are *rank shims*, and the *host shim* forks the agents of all
instances.
"""
