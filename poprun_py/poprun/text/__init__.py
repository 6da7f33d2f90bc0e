"""Values as text, and text as values: numbers, host names, fields of files, and what poprun writes itself."""

from types import MappingProxyType
from typing import Final

IF_USED: Final = MappingProxyType({"if_used": True})
"""The metadata of a field that a file has only where it differs from its default: see `fields`."""
