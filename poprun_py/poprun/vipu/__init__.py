"""The `vipu` program: it lists, makes, resets and removes partitions of virtual IPUs, and serves other hosts.

`vipu_command` and `serve_command` read the words, which are those of Graphcore's own program.
"""
