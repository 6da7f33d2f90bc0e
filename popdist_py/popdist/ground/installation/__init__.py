"""The torch and numpy of this Python: whether popdist can train with them, and if not, what to do."""
