"""The engine's own scheduler and caches on a virtual clock, driven by what steps cost."""
