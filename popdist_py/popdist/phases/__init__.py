"""Models that are larger than memory, with only a few layers in memory at a time, and layers computed twice."""
