"""The virtual IPUs and cores of a job: leased before it starts, held while it runs, given back at its end.

`pool_client` is what poprun calls. A lease on the machine of the pool is a locked file (`local_lease`), on another
host one that a process there holds (`host_leases`), at a server an entry (`poprun.devices.server.server_lease`).
`claims` is what all of them share.
"""
