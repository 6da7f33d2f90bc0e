"""The live view of running jobs, `poprun-top` and ``--monitor``, which finds jobs and draws their state."""
