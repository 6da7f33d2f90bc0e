"""Everything that only one maker of GPUs needs: environment variables, tools, and the parsing of outputs. Pure.

No other part of poprun names a maker, a maker's runtime or its variables: other parts speak only of devices.
"""
