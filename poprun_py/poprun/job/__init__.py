"""The supervision of a running job: receive events, make a snapshot of the job, decide on an action, act."""
