"""Will this model, on these GPUs, under this workload, fit, how fast, at what cost, on what."""
