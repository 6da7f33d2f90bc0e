"""The virtual IPUs and cores of a job: leased before it starts, kept while it runs, given back at its end.

`pool_client` is what poprun calls. A lease is an entry in a pool, and a process holds it as long as the job runs:

- On the machine of the pool it is an open file with a lock, which poprun and its agents hold open (`local_lease`).
- On other hosts a process that poprun starts there holds that file from attempt to attempt and gives it to the
  agents (`host_leases`).
- At a server it lasts while `renewal`, a process beside poprun, renews it (`server_lease`).

`claims` is the way from the request to the lease, which is the same everywhere.
"""
