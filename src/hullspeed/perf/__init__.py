"""Cost of a step: FLOPs and bytes to seconds."""
