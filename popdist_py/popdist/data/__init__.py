"""Datasets dealt to replicas: exact epochs, the same samples for a replica whatever the split."""
