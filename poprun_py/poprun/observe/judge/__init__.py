"""The conclusions from the facts: who waits for whom, who is at fault, who is slow, whether a restart helps."""
