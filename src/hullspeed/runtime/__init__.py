"""The engine with torch: executor, sampler, engine process and the library face.

Importing this package does not import torch; ``messages.py`` and ``config.py`` are free of it.
"""

import hullspeed.kernels  # noqa: F401 # before torch: it bounds how long idle threads spin
