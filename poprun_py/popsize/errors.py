"""The errors that the planner of model and machine raises."""


class SizingError(Exception):
    """Base class of all errors of popsize, whose texts say what was asked, what is wrong, what to do."""


class ModelError(SizingError):
    """Error: a model is unknown, or the description of a model is incomplete or wrong."""


class MachineError(SizingError):
    """Error: a machine is unknown, or a file of machines is incomplete or wrong."""


class MappingError(SizingError):
    """Error: a mapping, the division of a model over devices, breaks a rule of the model or machine."""


def shown(value: object) -> str:
    """Return ``value``, which a file contains, as a short text for an error, however large it is."""
    try:
        return f"{value!r:.40}"
    except (ValueError, RecursionError):
        return "too large to be shown"
