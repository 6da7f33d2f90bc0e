"""Models that run: what a call takes, what it does, and what it gives."""
