"""What goes wrong between instances, in one kind of error."""

from collections.abc import Iterator
from contextlib import contextmanager

from popdist.errors import BackendError
from popdist.progress_report import presence


@contextmanager
def as_backend_error(what: str) -> Iterator[None]:
    """Wait for the other instances in the block.

    Torch raises RuntimeError and subclasses of it for everything that goes wrong on the way.
    """
    presence.wait_again()
    try:
        yield
    except BackendError:
        raise
    except RuntimeError as error:
        reason = str(error).partition(". ")[0].splitlines()[0]
        raise BackendError(f"{what} ({reason.rpartition('.cc:')[2]})") from error
    finally:
        presence.go_on()
