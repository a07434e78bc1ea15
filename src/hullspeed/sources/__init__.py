"""Where a model's files come from: the hub, a folder, a file, a wheel."""
