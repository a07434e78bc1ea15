"""``hf:<repo>``: a model on the Hugging Face hub, through huggingface-hub.

huggingface-hub keeps its own cache and honours ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE``. Only configuration, tokenizer and weight files are fetched, never code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, get_session, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hullspeed.errors import SourceError
from hullspeed.sources.files import WEIGHT_SUFFIXES, ModelFiles, from_path, wanted
from hullspeed.sources.progress import Progress, silent

_REACH_S = 5.0
_REPO = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:/(?P<file>[\w.+-]+\.gguf))?(?:@(?P<revision>[\w./-]{1,200}))?$"
)


def split(reference: str) -> tuple[str, str | None, str | None]:
    """``ORG/NAME[/FILE.gguf][@REVISION]`` as repository, file and revision.

    Raises:
        SourceError: for anything else.
    """
    match = _REPO.match(reference)
    if match is None or ".." in reference:
        raise SourceError(
            "not a model on the hub",
            seen=reference,
            fix="write hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE.gguf",
        )
    return match["repo"], match["file"], match["revision"]


def pull(reference: str, progress: Progress = silent, *, need_weights: bool = True) -> ModelFiles:
    """The files of a hub model, from huggingface-hub's cache or the hub; without
    ``need_weights`` all but the weights, of which those in the cache are still found.

    Raises:
        SourceError: if the model is unknown, closed to this user, out of reach, or has no weights.
    """
    repo, file, revision = split(reference)
    names = _names(repo, revision, file)
    if names is not None and not need_weights:
        names = tuple(name for name in names if not name.endswith(WEIGHT_SUFFIXES))
    try:
        root = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(names) if names is not None else _patterns(file),
            ignore_patterns=["*/*"],
            local_files_only=names is None,
            tqdm_class=_reporting(progress, repo),
        )
    except LocalEntryNotFoundError as error:
        raise SourceError(
            "the hub is out of reach and the model is not in the local cache",
            seen=repo,
            fix="go online (HF_HUB_OFFLINE=0) and pull again, or give a local folder",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise refused(repo, error) from error
    path = Path(root) / file if file else Path(root)
    return from_path(
        path,
        source=f"hf:{reference}",
        revision=Path(root).name,
        need_weights=need_weights,
    )


def refused(repo: str, error: Exception) -> SourceError:
    """What a failed request to the hub means for the user."""
    first_line = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, GatedRepoError):
        return SourceError(
            "the model is gated", seen=repo, fix="accept its terms on the hub and set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return SourceError(
            "no such model on the hub, or it is private",
            seen=repo,
            fix="check the name; for a private model set HF_TOKEN",
        )
    if isinstance(error, RevisionNotFoundError):
        return SourceError("no such revision of the model", seen=repo, fix="check the @REVISION")
    return SourceError(f"the hub did not give {repo}", seen=first_line, fix="try again")


def _names(repo: str, revision: str | None, file: str | None) -> tuple[str, ...] | None:
    """The files to fetch, from the hub's listing; ``None`` if the hub is out of reach.

    Safetensors win over GGUF where a repository has both, unless one GGUF file is named.
    """
    api = HfApi()
    try:
        # One try first: the library itself tries a hub out of reach for half a minute.
        get_session().head(api.endpoint, timeout=_REACH_S)
        listed = api.list_repo_files(repo, revision=revision)
    except (OfflineModeIsEnabled, httpx2.TransportError, TimeoutError):
        return None
    except HfHubHTTPError as error:
        raise refused(repo, error) from error
    names = [name for name in listed if wanted(name)]
    if file:
        if file not in names:
            raise SourceError(
                "no such file in the model's repository",
                seen=file,
                fix=f"it has {', '.join(n for n in names if n.endswith('.gguf')) or 'no GGUF'}",
            )
        keep = re.compile(re.sub(r"-\d{5}-of-", r"-\\d{5}-of-", re.escape(file)))
        return tuple(n for n in names if not n.endswith((".gguf", ".safetensors")) or keep.match(n))
    if any(name.endswith(".safetensors") for name in names):
        return tuple(name for name in names if not name.endswith(".gguf"))
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) > 1 and "-of-" not in ggufs[0]:
        raise SourceError(
            "the repository holds several GGUF models",
            seen=ggufs,
            fix=f"name one: hf:{repo}/{ggufs[0]}",
        )
    return tuple(names)


def _patterns(file: str | None) -> list[str]:
    """What to look for in the local cache when the hub cannot be asked."""
    return ["*.json", "*.jinja", "*.model", "*.txt", file or "*.safetensors", file or "*.gguf"]


def _reporting(progress: Progress, task: str) -> type[Any]:
    """A tqdm class that draws nothing and tells ``progress`` of the bytes that arrive."""

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            # A disabled tqdm does not count.
            self.n += n or 0
            if self.counts_bytes:
                progress(task, int(self.n), int(self.total) if self.total else None)

    return Reporting
