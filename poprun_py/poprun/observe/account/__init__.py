"""Facts about a job: the state of its instances, the agents' reports, curves over time, and the job's record."""
