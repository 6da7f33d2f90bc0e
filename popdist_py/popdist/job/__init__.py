"""The job of this process: numbers of instances and replicas, collectives, and the broadcast of weights."""
