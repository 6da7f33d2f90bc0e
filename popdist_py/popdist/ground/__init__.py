"""The lowest folder of popdist, which all others use: contract, tree of additions, torch's private names."""
