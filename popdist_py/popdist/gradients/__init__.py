"""The gradients of all replicas: the memory for gradients, their exchange between instances, and their sum."""
