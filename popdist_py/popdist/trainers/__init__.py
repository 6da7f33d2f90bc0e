"""What the training loops of other libraries need so that each replica has the batches of one process.

A replica of popdist takes the place of a process of the other library: of R replicas, replica r reads the batches
that process r of R processes reads. An instance takes the micro batches of its replicas one after the other.
"""
