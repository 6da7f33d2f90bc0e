"""The planner: it decides everything about a job before the start, from the options and the machine. Pure."""
