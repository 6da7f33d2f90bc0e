"""A plan as a picture: hosts, instances, replicas and virtual IPUs.

`scene` says what is shown, `frames` what stands together, `grids` where, `measures` how large, `details` what is
told of each thing, and `drawing` draws it.
"""
