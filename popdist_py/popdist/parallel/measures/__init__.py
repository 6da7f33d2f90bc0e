"""Measurements for a planner: a module's operations, this machine, and the steps of a model in phases."""
