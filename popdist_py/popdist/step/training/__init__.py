"""Replicas of a model: equal weights at the start, and in each step the gradient of all of them."""
