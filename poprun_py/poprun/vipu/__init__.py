"""The `vipu` program: it lists, makes, resets and removes partitions of this machine's virtual IPUs.

`command` reads the words, `listing` makes rows of what stands in the pool. The words are those of Graphcore's own.
"""
