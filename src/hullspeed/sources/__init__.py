"""Where a model comes from: a package, the hub, a folder or a file, resolved to local files."""

from hullspeed.sources.cache import cache_dir
from hullspeed.sources.files import ModelFiles
from hullspeed.sources.progress import Progress
from hullspeed.sources.resolve import resolve

__all__ = ["ModelFiles", "Progress", "cache_dir", "resolve"]
