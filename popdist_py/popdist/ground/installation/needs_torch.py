"""Raises an InstallationError when it is imported, unless popdist can train with the torch that is installed.

Each way to what trains leads by here first: what Python or torch would say names no remedy.
"""

from popdist.errors import InstallationError
from popdist.ground.installation.torch_found import find_trouble

if trouble := find_trouble():
    raise InstallationError(trouble)
