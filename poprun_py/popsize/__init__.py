"""A planner that finds which division of a model over devices (mapping) fits in memory, and which is fastest.

`model`, `hardware` and `mapping` describe a model, a machine, and how devices share the model. `footprint` and
`duration` predict the memory and the duration of a mapping; `search` ranks all mappings.
"""
