"""A plan as a picture: hosts, instances, replicas and virtual IPUs.

`scene` says what is shown and framed, `drawing` where, how large and how, and `documents` makes a file of that.
"""
