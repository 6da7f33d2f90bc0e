"""Memory that the processes of one host share, with barriers and collectives in it. No network."""
