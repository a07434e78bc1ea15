"""HTTP API over the engine process."""
