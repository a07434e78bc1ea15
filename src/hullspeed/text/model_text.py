"""ModelText: everything a model's files say about text: tokenizer, chat template, end tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hullspeed.arch.gguf import GgufFile
from hullspeed.errors import CorruptFileError
from hullspeed.text.tokenizer import Tokenizer, read_json

# Control tokens by which chat formats close a turn: ChatML, Llama 3, Phi 3, Gemma, gpt-oss.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>")


@dataclass(frozen=True, slots=True)
class ModelText:
    """Read from a GGUF file or a model folder.

    Attributes:
        template: The chat template's jinja2 source; ``None`` for a model without.
        eos_token_ids: Union of every end token that the tokenizer, config.json,
            generation_config.json and the chat template name: dropping one of several makes a
            model that never stops.
    """

    tokenizer: Tokenizer
    template: str | None
    eos_token_ids: tuple[int, ...]


def read_model_text(path: Path) -> ModelText:
    """Read the text side of the model at ``path``, a ``.gguf`` file or a folder.

    Raises:
        ModelError: a file is missing, corrupt or of a kind not supported here.
    """
    if path.is_file():
        return from_metadata(GgufFile(path).metadata)
    tokenizer = Tokenizer.from_folder(path)
    template = _folder_template(path)
    return ModelText(
        tokenizer,
        template,
        _union(tokenizer, template, [*_config_ends(path, "config.json"),
                                     *_config_ends(path, "generation_config.json")]),
    )  # fmt: skip


def from_metadata(metadata: Mapping[str, object]) -> ModelText:
    """From the key-value part of a GGUF file that is open already."""
    tokenizer = Tokenizer.from_gguf(metadata)
    template = metadata.get("tokenizer.chat_template")
    source = template if isinstance(template, str) and template else None
    return ModelText(tokenizer, source, _union(tokenizer, source, []))


def _union(tokenizer: Tokenizer, template: str | None, configured: list[int]) -> tuple[int, ...]:
    by_template = [
        tokenizer.control[text]
        for text in _TURN_ENDS
        if template is not None and text in template and text in tokenizer.control
    ]
    return tuple(dict.fromkeys((*tokenizer.eos_ids, *configured, *by_template)))


def _config_ends(folder: Path, name: str) -> Iterator[int]:
    path = folder / name
    if not path.is_file():
        return
    config = read_json(path)
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise CorruptFileError(f"eos_token_id in {name} is no token id", seen=token)
            yield token


def _folder_template(folder: Path) -> str | None:
    """``chat_template.jinja``, or ``chat_template`` of tokenizer_config.json; never anything
    that a request brings.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{path.name} is not UTF-8", seen=str(error)) from None
    config_path = folder / "tokenizer_config.json"
    value = read_json(config_path).get("chat_template") if config_path.is_file() else None
    if isinstance(value, list):  # several by name: the one called default is the chat's
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}.get(
            "default"
        )
    return value if isinstance(value, str) and value else None
