"""Metrics that a program measures over all instances of a job."""
