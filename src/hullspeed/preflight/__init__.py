"""The gate: is the stack whole, from driver to model files."""
