"""What poprun, its agents and its monitors send each other, and the connection that carries it."""
