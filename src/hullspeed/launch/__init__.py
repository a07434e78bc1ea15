"""Commands and manifests for other engines, and their supervision."""
