"""The script of the shim: ``python -I -S start_shim.py``; it is short because Python compiles it at each start."""

import gc
import os
import sys

gc.disable()
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from poprun.launch.shim import LISTENER, Shim, main  # noqa: E402 - a bare interpreter needs the path first

if LISTENER in os.environ:
    from poprun.launch.host_shim import HostShim

    main(HostShim)
else:
    main(Shim)
