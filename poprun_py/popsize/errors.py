"""The errors that the planner raises."""


class SizingError(Exception):
    """Base class of all errors of popsize. The text names the request, the broken rule, and what to do."""


class ModelError(SizingError):
    """Error: a model is unknown, or the description of a model is incomplete or wrong."""


class MachineError(SizingError):
    """Error: a machine is unknown, or a file of machines is incomplete or wrong."""


class MappingError(SizingError):
    """Error: no program could run a mapping, because the mapping breaks a rule of the model or of the machine."""


def shown(value: object) -> str:
    """Return a value from a file as a short text for an error, even if the value is very large or deep."""
    try:
        return f"{value!r:.40}"
    except (ValueError, RecursionError):
        return "too large to be shown"
