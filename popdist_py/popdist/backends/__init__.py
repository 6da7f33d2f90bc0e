"""How the instances of a job reach each other: one module for each way, behind `popdist.backends.base`."""
