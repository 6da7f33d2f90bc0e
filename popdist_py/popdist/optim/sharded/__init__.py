"""A sharded optimizer: each instance updates its part of the parameters."""
