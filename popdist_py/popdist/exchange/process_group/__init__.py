"""The backend ``popdist`` of torch.distributed: CPU collectives through the shared memory of the host."""
