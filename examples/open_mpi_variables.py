"""A program that finds its place in Open MPI's variables, as many do that do not call MPI themselves.

poprun -n 4 python examples/open_mpi_variables.py
"""

import os


def main() -> None:
    """Show this process's share of ten items of work."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    local_rank = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    print(f"rank {rank} of {size}, local rank {local_rank}: items {list(range(10))[rank::size]}", flush=True)


if __name__ == "__main__":
    main()
