"""The backend ``popdist`` of torch.distributed: its collectives on the CPU, through the memory of the host."""
