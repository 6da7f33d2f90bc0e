"""The pool of another host, over HTTP: what is sent, and the client's side of it.

`wire` holds what both sides say, as values and as JSON; `token_file` keeps what lets a client in. `connection`
asks one thing of a server, with the standard library alone, and `client` all that there is to ask. A job's lease
is renewed by a process of its own, `keeper`, which `keeping` starts: it ends when the job has.
"""
