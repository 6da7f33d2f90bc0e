"""The trace of a whole job: all programs' recordings on one clock, and where the time of each step went."""
