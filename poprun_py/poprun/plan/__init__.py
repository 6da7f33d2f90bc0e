"""The planner: it makes a plan from a request and the facts of a machine. Pure."""
