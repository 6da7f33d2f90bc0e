"""Datasets dealt to replicas: exact epochs, and the same samples for a replica with any number of instances."""
