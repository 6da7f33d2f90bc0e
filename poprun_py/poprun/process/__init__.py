"""Processes of this machine: started, found in their tree, signalled, asked. Standard library only."""
