"""Is an endpoint correct. Speaks HTTP only."""
