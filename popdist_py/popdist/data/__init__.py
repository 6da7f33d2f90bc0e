"""Datasets dealt to replicas: each sample once an epoch, and the same samples for any number of instances."""
