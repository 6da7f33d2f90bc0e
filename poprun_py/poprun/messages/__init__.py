"""The messages of poprun, its agents and its monitors, and the connection that carries them."""
