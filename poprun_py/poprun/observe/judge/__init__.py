"""What follows from what is known: who waits for whom, who is at fault, who is slow; whether a restart helps."""
