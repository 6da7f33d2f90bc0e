"""Which attributes of an optimizer may change once a model runs: the variable ones; the constant ones stay."""

from collections.abc import Iterable


class VariableAttributes:
    """The variable attributes of one optimizer, by name, for all its groups.

    Args:
        variable_attributes: Those that are variable at first.
        allowed_attributes: All that can be variable.
    """

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        self._allowed_attributes = list(allowed_attributes)
        self._variable_attributes = [name for name in variable_attributes if name in self._allowed_attributes]

    def isConstant(self, attr: str) -> bool:
        """Whether ``attr`` keeps its value while a model runs."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Keep the value of ``attr``.

        Raises:
            AssertionError: If it is no attribute that can be variable.
        """
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let ``setOptimizer`` change ``attr``.

        Raises:
            AssertionError: If it is no attribute that can be variable.
        """
        self._check(attr)
        if self.isConstant(attr):
            self._variable_attributes.append(attr)

    def __copy__(self) -> "VariableAttributes":
        return VariableAttributes(self._variable_attributes, self._allowed_attributes)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed_attributes:
            allowed = ", ".join(self._allowed_attributes)
            raise AssertionError(f"{attr!r} is no attribute that can be variable: choose from {allowed}")
