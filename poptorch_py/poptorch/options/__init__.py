"""All that a program says of how its model runs."""

from poptorch.errors import ConfigFileError as ConfigFileError
from poptorch.options.model_options import Options as Options
from poptorch.options.model_options import check_options as check_options
from poptorch.options.sub_options import TensorLocationSettings as TensorLocationSettings
from poptorch.options.sub_options import _DistributedOptions as _DistributedOptions
