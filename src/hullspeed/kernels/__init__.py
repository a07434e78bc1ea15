"""The arithmetic of a step, per back end."""
