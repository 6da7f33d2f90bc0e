"""A function as a job: `popdist.launch` starts poprun, and each instance calls the function."""
