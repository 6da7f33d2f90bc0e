"""What PopTorch's programs ask of its inside."""


def isDispatchTracing() -> bool:
    """False: nothing is traced."""
    return False
