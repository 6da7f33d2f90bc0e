"""Memory that the processes of one host share, and what they do in it: meet, wait, add. No network, no names."""
