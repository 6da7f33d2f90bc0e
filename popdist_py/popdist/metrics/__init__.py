"""Figures of merit over all instances of a job."""
