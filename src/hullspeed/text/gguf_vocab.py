"""A GGUF file's vocabulary as a backend of the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hullspeed.errors import CorruptFileError, UnsupportedModelError

# gguf.md, "tokenizer.ggml.token_type"
_CONTROL = 3
_USER_DEFINED = 4


class Vocabulary(NamedTuple):
    """A backend that never produces a control token, and the control tokens beside it."""

    backend: Backend
    control: dict[str, int]
    n_tokens: int


class _Split(NamedTuple):
    regexes: tuple[str, ...]
    normalizer: str | None
    ignore_merges: bool


@cache
def _splits() -> dict[str, _Split]:
    """The pre-tokenizers we know, by the name in ``tokenizer.ggml.pre``."""
    data = json.loads(Path(__file__).with_name("pretokenizers.json").read_text("utf-8"))
    return {
        name: _Split(tuple(entry["regexes"]), entry["normalizer"], entry["ignore_merges"])
        for entry in data["entries"]
        for name in entry["names"]
    }


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """Build the vocabulary that ``metadata`` (the key-value part of a GGUF file) describes.

    Raises:
        UnsupportedModelError: a vocabulary or pre-tokenizer that is not known here.
        CorruptFileError: the vocabulary is missing or contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModelError(
            "this GGUF file's vocabulary is not byte-level BPE",
            seen=kind,
            fix="use the model's folder with tokenizer.json, or a file with a gpt2 vocabulary",
        )
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    split = _splits().get(name)
    if split is None:
        raise UnsupportedModelError(
            "no rule is known for splitting this model's text",
            seen=name,
            fix=f"known: {', '.join(sorted(_splits()))}; or use the folder with tokenizer.json",
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    merges = _strings(metadata, "tokenizer.ggml.merges")
    return _build(tokens, _types(metadata, len(tokens)), merges, split)


def _build(tokens: list[str], types: list[int], merges: list[str], split: _Split) -> Vocabulary:
    # Control tokens stay out of the backend: no text can become one, whatever it says.
    control = {t: i for i, t in enumerate(tokens) if types[i] == _CONTROL}
    words = {t: i for i, t in enumerate(tokens) if types[i] != _CONTROL}
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    try:
        model = models.BPE(vocab=words, merges=pairs, ignore_merges=split.ignore_merges)
    # The library raises its errors as plain Exception; nothing else can happen in this call.
    except Exception as error:  # noqa: BLE001
        raise CorruptFileError(
            "the vocabulary's merges do not fit its tokens", seen=str(error), fix="fetch it again"
        ) from None
    backend = Backend(model)
    if split.normalizer == "NFC":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(r), behavior="isolated") for r in split.regexes),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    added = [t for i, t in enumerate(tokens) if types[i] == _USER_DEFINED]
    backend.add_tokens([AddedToken(t, normalized=False) for t in added])
    return Vocabulary(backend, control, len(tokens))


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise CorruptFileError(f"{key} is not a list of strings", seen=value, fix="fetch it again")
    return value


def _types(metadata: Mapping[str, object], n_tokens: int) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    types: list[int] = [1] * n_tokens if value is None else np.asarray(value).tolist()
    if len(types) != n_tokens:
        raise CorruptFileError(
            f"the vocabulary has {n_tokens} tokens but another number of token types",
            seen=len(types),
            fix="fetch the file again",
        )
    return types
