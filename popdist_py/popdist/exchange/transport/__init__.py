"""How the instances of a job reach each other."""
