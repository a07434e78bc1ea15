"""The production scheduler driven by the cost model on a virtual clock."""
