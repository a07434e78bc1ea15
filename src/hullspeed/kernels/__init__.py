"""The arithmetic of a step, per back end.

``base.py`` is the contract, ``ref.py`` the truth in plain torch, ``cpu/`` FBGEMM and numba.
Importing this package does not import torch; ``load.load_kernels`` picks a back end.
"""

from hullspeed.kernels.threads import limit_spinning

limit_spinning()
