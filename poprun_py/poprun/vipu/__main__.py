"""`python -m poprun.vipu`."""

from poprun.vipu.command import main

if __name__ == "__main__":
    main()
