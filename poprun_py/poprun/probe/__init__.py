"""What is found on this machine: its names, cores, GPUs, MPI runtimes, and the user's program.

Everything here touches the machine and decides nothing; the planner takes what is found as an argument.
"""
