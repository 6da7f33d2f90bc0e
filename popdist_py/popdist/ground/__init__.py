"""What all rooms of popdist stand on: the contract, the tree of additions, the names that torch hides."""
