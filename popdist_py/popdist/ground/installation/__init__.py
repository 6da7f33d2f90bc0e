"""The check whether popdist can train with the torch and numpy of this Python, and the remedy if it cannot."""
