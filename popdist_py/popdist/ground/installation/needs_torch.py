"""An import that raises InstallationError, unless popdist can train with the torch that is installed.

Modules that train import this module first, because the errors of Python or torch would not name a remedy.
"""

from popdist.errors import InstallationError
from popdist.ground.installation.torch_found import find_trouble

if trouble := find_trouble():
    raise InstallationError(trouble)
