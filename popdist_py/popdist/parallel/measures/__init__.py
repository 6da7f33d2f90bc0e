"""What a planner needs to know, measured: a module's operations, this machine, the steps of a model in phases."""
