"""PopTorch's optimizers, and what they do on a device."""

from poptorch.optim.optimizers import LAMB as LAMB
from poptorch.optim.optimizers import SGD as SGD
from poptorch.optim.optimizers import Adam as Adam
from poptorch.optim.optimizers import AdamW as AdamW
from poptorch.optim.optimizers import Optimizer as Optimizer
from poptorch.optim.optimizers import RMSprop as RMSprop
from poptorch.optim.optimizers import VariableAttributes as VariableAttributes
