"""The gradients of all replicas: where they lie, how they travel, and the one order in which they are added."""
