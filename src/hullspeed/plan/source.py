"""load_model: a model's name to what the planner needs, reading no weight."""

from __future__ import annotations

from hullspeed.arch import catalogue
from hullspeed.arch.load import load_arch
from hullspeed.errors import SourceError
from hullspeed.plan.model import PlannedModel
from hullspeed.sources.progress import Progress, silent
from hullspeed.sources.resolve import resolve


def load_model(name: str, progress: Progress = silent) -> PlannedModel:
    """The model behind ``name``: bundled catalogue, this machine's files, or the hub's headers.

    Raises:
        SourceError: if there is no such model; names the nearest of the catalogue.
        UnsupportedModelError: if its architecture is not known here, or a field is missing.
        CorruptFileError: if a file contradicts itself.
    """
    if catalogue.lookup(name) is not None:
        origin = catalogue.source(name) or "catalogue"
        return PlannedModel.of(name, catalogue.load(name), f"bundled config: {origin}")
    try:
        files = resolve(name, progress, need_weights=False)
    except SourceError as error:
        near = catalogue.suggestions(name)
        if not near:
            raise
        raise SourceError(
            error.what,
            seen=error.seen,
            fix=f"{error.fix}; the catalogue has {', '.join(near)}".removeprefix("; "),
        ) from error
    revision = f" at {files.revision}" if files.revision else ""
    return PlannedModel.of(name, load_arch(files), f"{files.source}{revision} ({files.kind})")
