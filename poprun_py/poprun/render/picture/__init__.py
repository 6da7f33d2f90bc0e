"""A plan as a picture: hosts, instances, replicas and virtual IPUs.

`scene` says what is shown and framed, `measures` where and how large, `drawing` draws it, and `documents` makes a
file of the drawing.
"""
