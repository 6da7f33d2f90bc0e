"""The proof that all instances have made the same reader: another one would lose samples or repeat them."""

from popdist import context


class Agreement:
    """Is proven once: when it is made, or, if that is before ``init()``, when it is next asked for.

    Args:
        text: What must be the same on every instance, in words.

    Raises:
        CollectiveError: If the instances differ, or do not all make one.
    """

    def __init__(self, text: str) -> None:
        self._text: str | None = text
        self.prove()

    def prove(self) -> None:
        """Compare with the others, unless that has been done; before ``init()`` nobody can be asked.

        Raises:
            CollectiveError: If the instances differ, or do not all ask.
        """
        if self._text is not None and context.is_initialized():
            text, self._text = self._text, None
            context.current_group().agree(text)
