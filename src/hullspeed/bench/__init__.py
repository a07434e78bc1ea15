"""Load generator and measurement. Speaks HTTP only."""
