"""The errors of the planner."""


class SizingError(Exception):
    """Base of all errors of this package: what was asked, what rule it breaks, what to do."""


class ModelError(SizingError):
    """A model that is not known, or a description of one that lacks something."""


class MachineError(SizingError):
    """A machine that is not known, or a file of machines that lacks something."""


class MappingError(SizingError):
    """A mapping that no program could run: it breaks a rule of the model or of the machine."""


def shown(value: object) -> str:
    """A value of a file as an error shows it, however large or deep it is."""
    try:
        return f"{value!r:.40}"
    except (ValueError, RecursionError):
        return "too large to be shown"
