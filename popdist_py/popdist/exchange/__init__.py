"""How instances exchange data: within a host, between hosts, and as a backend of ``torch.distributed``."""
