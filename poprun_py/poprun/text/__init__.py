"""Conversion of values to text and back: numbers, host names, fields of files; the messages of poprun."""

from types import MappingProxyType
from typing import Final

IF_USED: Final = MappingProxyType({"if_used": True})
"""The metadata of a field that a file contains only if the value differs from the default: see `fields`."""
