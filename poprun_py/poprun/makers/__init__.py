"""What is particular to a maker of devices: masks, tools, and what the tools print. Pure.

No other part of poprun names a maker, its runtime or its variables: everything else speaks of devices.
"""
