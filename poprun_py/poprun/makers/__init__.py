"""Everything that is specific to a maker of devices: masks, tools, and the output of the tools. Pure.

No other part of poprun names a maker, a maker's runtime or its variables: other parts speak only of devices.
"""
