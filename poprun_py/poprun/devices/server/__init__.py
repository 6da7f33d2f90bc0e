"""The server of leases on virtual IPUs, for hosts that have no own record of leases, and its clients.

`server_messages` has the messages between server and client. A client uses `server_client`, which sends through
`server_connection`. `server_lease` holds a job's lease, and `renewal` renews it. `server` listens and answers,
`served_leases` ends leases that are not renewed, and `sole_server` prevents a second server.
"""
