"""Memory that the processes of one host share, and barriers and collectives in this memory. No network."""
