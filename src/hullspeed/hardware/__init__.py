"""What a machine is, in numbers: catalogue, detection and measured ceilings."""
