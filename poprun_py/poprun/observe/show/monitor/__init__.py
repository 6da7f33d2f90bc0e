"""The monitor of running jobs, `poprun-top` and ``--monitor``: finds them, listens to them, draws them."""
