"""The trace of a whole job: the recordings of all programs on one clock, and the time of each step."""
