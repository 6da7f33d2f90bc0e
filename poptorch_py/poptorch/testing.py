"""What tests of programs compare results of models with."""

from torch.testing import assert_close


def allclose(expected: object, found: object, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether two results are nested alike, and their tensors are close, of one dtype and one shape.

    Args:
        expected: Tensors and numbers, in lists, tuples and dicts.
        found: What is compared with them.
        rtol: The largest difference of two numbers, as a part of the expected one.
        atol: What the difference may be beyond that.
    """
    try:
        assert_close(found, expected, rtol=rtol, atol=atol)
    except AssertionError:
        return False
    return True
