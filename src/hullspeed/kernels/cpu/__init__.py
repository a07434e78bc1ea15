"""The CPU back end: FBGEMM for linear layers, numba for everything between them."""
