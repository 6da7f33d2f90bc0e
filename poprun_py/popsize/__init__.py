"""A pure planner: which mapping of a model to devices fits, and which is fastest.

A model and a machine are values (`model`, `hardware`); a mapping says how devices share the model (`mapping`);
`footprint` and `duration` predict it, `search` ranks all of them.
"""
