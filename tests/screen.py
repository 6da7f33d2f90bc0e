"""A terminal small enough to read: what stands on the screen after some text was written to it."""

import re

_PIECES = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def rows_of(text: str) -> list[str]:
    """The rows of a wide screen, without empty ones at the end; colours are left out.

    Raises:
        AssertionError: At an escape sequence that this terminal does not know.
    """
    rows, row, column = [""], 0, 0
    for piece in _PIECES.finditer(text):
        number, command, control, plain = piece.groups()
        if plain:
            rows[row] = rows[row][:column].ljust(column) + plain + rows[row][column + len(plain) :]
            column += len(plain)
        elif control == "\r":
            column = 0
        elif control == "\n":  # the line discipline adds the carriage return
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif command == "K":
            rows[row] = rows[row][:column]
        elif command == "A":
            row = max(0, row - int(number or 1))
        else:
            assert command == "m", f"unknown escape sequence {piece[0]!r}"
    while rows and not rows[-1]:
        rows.pop()
    return rows
