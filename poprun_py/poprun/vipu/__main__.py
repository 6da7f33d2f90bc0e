"""Runs the `vipu` program as ``python -m poprun.vipu``."""

from poprun.vipu.vipu_command import main

if __name__ == "__main__":
    main()
