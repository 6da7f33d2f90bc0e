"""Combined batches of a process's part of the data."""
