"""One trace of a whole job: what the programs have recorded, on one clock, and where their time went."""
