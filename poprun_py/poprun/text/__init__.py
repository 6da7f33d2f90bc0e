"""Conversion of numbers, host names and fields of files to text and back, and the messages of poprun."""

from types import MappingProxyType
from typing import Final

IF_USED: Final = MappingProxyType({"if_used": True})
"""The metadata of a dataclass field that a file contains only if the value is not the default: see `fields`."""
