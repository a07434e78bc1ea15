"""What a machine is, in numbers: a catalogue of GPUs, this machine, and measured ceilings."""
