"""The `vipu` program: it lists, makes, resets and removes partitions of virtual IPUs, and serves other hosts.

`vipu_command` and `serve_command` read the words, which are those of Graphcore's own program. `target_pool` is the
pool that they work on, and `listing` shows what stands in it. The server is `server`, a process that listens,
`answers`, which it gives to its clients, and `served_leases`, which it ends when nobody renews them.
"""
