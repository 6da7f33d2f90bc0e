"""Parts for training loops of other libraries, in which each replica trains on the batches of one process.

A replica of popdist takes the place of a process of the other library: of R replicas, replica r reads the batches
that process r of R processes reads. An instance takes the micro batches of its replicas one after the other.
"""
