"""The monitor of running jobs, `poprun-top` and ``--monitor``, which finds jobs, receives views and draws them."""
