"""What PopTorch's programs ask of its inside."""


def isDispatchTracing() -> bool:
    """False: nothing is traced."""
    return False


def _restoreWrapperIfNecessary(obj: object) -> object:
    """``obj`` itself: what was saved of a wrapped module holds plain tensors and modules."""
    return obj
