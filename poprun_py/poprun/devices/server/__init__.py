"""The server of a pool, for hosts without a pool of their own: ``vipu serve`` and its clients.

`server_messages` are what the two send each other. A client uses `server_client`, which asks through
`server_connection`; a job's lease is `server_lease`, which `renewal` renews. The server is `server`, which listens
and answers, and `served_leases`, which it ends when nobody renews them; `sole_server` keeps a second one away.
"""
