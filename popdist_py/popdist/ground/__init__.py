"""The lowest folder of popdist, which all other folders use: contract, tree of sums, torch's private names."""
