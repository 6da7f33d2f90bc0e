"""Look at running jobs: find them, listen to them, draw them. This is `poprun-top`, and ``--monitor``."""
