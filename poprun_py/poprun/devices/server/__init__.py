"""The server of a pool, for hosts without a pool of their own: ``vipu serve`` and its clients.

`server_messages` has the messages between them. A client uses `server_client`, which sends through
`server_connection`. `server_lease` holds a job's lease, and `renewal` renews it. `server` listens and answers,
`served_leases` ends leases that are not renewed, and `sole_server` prevents a second server.
"""
