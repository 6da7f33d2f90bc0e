"""The transport of a job: the connections between instances, on one or several hosts, and their collectives."""
