"""The picture of a plan as SVG or HTML: hosts, instances, replicas and virtual IPUs.

`scene` chooses what is drawn, `drawing` draws it, and `documents` makes SVG or HTML files of drawings.
"""
