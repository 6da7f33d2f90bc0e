"""Which job this process is in, and what a program asks of the job: counts, collectives, weights alike."""
