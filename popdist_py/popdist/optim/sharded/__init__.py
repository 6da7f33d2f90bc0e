"""The sharded optimizer: each instance updates its own part of the parameters."""
