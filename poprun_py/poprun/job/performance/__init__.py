"""How fast the instances of a job are, what their numbers were in the course of time, and who is slow."""
