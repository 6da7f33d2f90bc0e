"""Exchange of data between instances: within a host, between hosts, and as a backend of ``torch.distributed``."""
