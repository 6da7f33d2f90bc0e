"""How fast the instances of a job are, and what their speed and their numbers were in the course of time. Pure."""
