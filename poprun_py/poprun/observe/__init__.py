"""What is known and shown of a job: its trace, its page, its reports, its live view."""
