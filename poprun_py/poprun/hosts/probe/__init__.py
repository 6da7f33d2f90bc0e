"""The facts of this machine: names, cores, GPUs, MPI runtimes and limits; and the user's program.

The modules only find facts and decide nothing; the planner gets the facts as an argument.
"""
