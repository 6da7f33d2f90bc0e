"""Leases on a job's virtual IPUs and cores: acquired before the job starts, released after the job has ended.

poprun calls `pool_client`. On this machine a lease is a locked file (`local_lease`). On another host a process
holds the locked file (`host_leases`). At a server a lease is an entry (`poprun.devices.server.server_lease`).
`claims` has the code that all leases share.
"""
