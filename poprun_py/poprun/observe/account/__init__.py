"""The facts about a job: the state of its instances, their reports and curves, and the job's record."""
