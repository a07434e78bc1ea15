"""What a step costs in seconds: measured ceilings on this machine, a roofline on any GPU."""
