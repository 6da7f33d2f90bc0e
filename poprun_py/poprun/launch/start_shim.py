"""The shim's script: ``python -I -S start_shim.py``. Python compiles it at each start, so it is short."""

import gc
import os
import sys

gc.disable()
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from poprun.launch.shim import LISTENER, Shim, main  # noqa: E402 - a bare interpreter has to be told where it is

if LISTENER in os.environ:
    from poprun.launch.host_shim import HostShim

    main(HostShim)
else:
    main(Shim)
