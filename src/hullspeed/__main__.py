"""``python -m hullspeed``."""

from hullspeed.cli.main import main

main()
