"""The other hosts of a job: the routes between them, and the look at each of them before anything starts."""
