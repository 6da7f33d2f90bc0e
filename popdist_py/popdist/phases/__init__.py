"""Models larger than memory, of which a few layers at a time are in it, and layers that are computed again."""
