"""What is found on this machine: its names, cores, GPUs, MPI runtimes and limits, and the user's program.

Everything here looks at the machine and decides nothing; the planner takes what is found as an argument.
"""
