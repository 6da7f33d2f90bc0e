"""A program that speaks MPI through mpi4py and knows nothing of poprun: it runs under mpiexec as well.

poprun -n 4 python examples/mpi_sum.py
"""

from mpi4py import MPI


def main() -> None:
    """Add the ranks up and show what every process got."""
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    total = world.allreduce(rank, op=MPI.SUM)
    print(f"rank {rank} of {size}: the ranks add up to {total}", flush=True)


if __name__ == "__main__":
    main()
