"""Training with replicas of a model: equal weights at the start, one gradient over all replicas in each step."""
