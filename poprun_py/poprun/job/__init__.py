"""The supervisor of a job, from its plan to its end: listen, snapshot, decision, action."""
