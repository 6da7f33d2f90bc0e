"""Functions as jobs: `popdist.launch` starts poprun, and each instance of the job calls the same function."""
