"""How a row of things is dealt to parts: the one rule by which samples are shared out.

Consecutive parts of equal size, the first ones larger by one where the row does not divide, as
``torch.tensor_split`` cuts. The rule composes: dealing a step to all replicas gives replica r the same samples as
dealing the joined samples of one instance to its local replicas. Pure arithmetic on ranges.
"""


def part(row: range, index: int, num_parts: int) -> range:
    """Part ``index`` of ``row`` dealt to ``num_parts``; empty when the parts are more than the things."""
    return parts(row, range(index, index + 1), num_parts)


def parts(row: range, indices: range, num_parts: int) -> range:
    """The consecutive parts ``indices`` of ``row`` dealt to ``num_parts``, joined to one range."""
    return row[_start(len(row), indices.start, num_parts) : _start(len(row), indices.stop, num_parts)]


def _start(size: int, index: int, num_parts: int) -> int:
    base, larger = divmod(size, num_parts)
    return index * base + min(index, larger)
