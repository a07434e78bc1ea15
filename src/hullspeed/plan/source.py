"""load_model: a model's name to what the planner needs, reading no weight."""

from __future__ import annotations

from hullspeed.arch.load import load_arch
from hullspeed.plan.model import PlannedModel
from hullspeed.sources.progress import Progress, silent
from hullspeed.sources.resolve import resolve


def load_model(name: str, progress: Progress = silent) -> PlannedModel:
    """The model behind ``name``: bundled catalogue, this machine's files, or the hub's headers.

    Raises:
        SourceError: if there is no such model.
        UnsupportedModelError: if its architecture is not known here, or a field is missing.
        CorruptFileError: if a file contradicts itself.
    """
    files = resolve(name, progress, need_weights=False)
    revision = f" at {files.revision}" if files.revision else ""
    return PlannedModel.of(name, load_arch(files), f"{files.source}{revision} ({files.kind})")
