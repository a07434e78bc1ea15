"""Tokenizer: text to token ids and back, for GGUF vocabularies and tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer as Backend

from hullspeed.errors import (
    CorruptFileError,
    RequestError,
    SourceError,
    UnsupportedModelError,
)
from hullspeed.text.gguf_vocab import read_vocabulary

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-F]{2})>$")


class Tokenizer:
    """Text to ids and back.

    Plain text never yields a control token (``<|im_end|>``, end of text, ...): the backend does
    not know them. They are parsed only where ``parse_special`` asks for it. A byte that the
    vocabulary has no token for is dropped, as every user of such a vocabulary does (SmolLM2's
    lacks 21, among them those of U+40000 and above).

    Attributes:
        vocab: Number of token ids (ids at or above it decode to nothing).
        control: Control tokens by their text.
        bos_id: Token before a text, if the model has one.
        adds_bos: Whether the model expects ``bos_id`` before every text.
        eos_ids: Tokens that end the model's turn, as far as the tokenizer's files name them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        control: Mapping[str, int],
        vocab: int,
        bos_id: int | None = None,
        adds_bos: bool = False,
        eos_ids: tuple[int, ...] = (),
        byte_level: bool = True,
    ) -> None:
        self.vocab = vocab
        self.control = dict(control)
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None
        self.eos_ids = eos_ids
        self._backend = backend
        self._byte_level = byte_level
        self._control_ids = frozenset(self.control.values())
        longest_first = sorted(self.control, key=len, reverse=True)
        self._control_re = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._bytes: list[bytes] | None = None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From the key-value part of a GGUF file.

        Raises:
            UnsupportedModelError: a vocabulary or pre-tokenizer that is not known here.
            CorruptFileError: the vocabulary contradicts itself.
        """
        found = read_vocabulary(metadata)

        def id_of(key: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{key}_token_id")
            return value if isinstance(value, int) and 0 <= value < found.n_tokens else None

        ends = (id_of("eos"), id_of("eot"), id_of("eom"))
        return cls(
            found.backend,
            control=found.control,
            vocab=found.n_tokens,
            bos_id=id_of("bos"),
            adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
            eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From ``tokenizer.json`` and ``tokenizer_config.json`` in ``folder``.

        Raises:
            SourceError: there is no tokenizer.json.
            CorruptFileError: a file is not what its name says.
            UnsupportedModelError: a decoder other than byte-level or byte-fallback.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise SourceError(
                "the model has no tokenizer", seen=folder.name, fix=f"add {path.name}"
            )
        spec = read_json(path)
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        try:
            backend = Backend.from_file(str(path))
        # The library raises its errors as plain Exception; nothing else can happen in this call.
        except Exception as error:  # noqa: BLE001
            raise CorruptFileError(
                f"{path.name} cannot be read", seen=str(error), fix="fetch the model again"
            ) from None
        backend.encode_special_tokens = True  # specials in plain text stay plain text
        return cls._of_json(backend, spec, config)

    @classmethod
    def _of_json(
        cls, backend: Backend, spec: Mapping[str, object], config: Mapping[str, object]
    ) -> Tokenizer:
        added = backend.get_added_tokens_decoder()
        control = {token.content: i for i, token in added.items() if token.special}
        bos, eos = (_token_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
        bos_id = backend.token_to_id(bos) if bos else None
        eos_id = backend.token_to_id(eos) if eos else None
        # Post-processors that put something before the text do so with BOS (Llama 3, Gemma).
        leading = backend.encode("a").ids[:1]
        return cls(
            backend,
            control=control,
            vocab=1 + max((*backend.get_vocab(with_added_tokens=True).values(), 0)),
            bos_id=bos_id,
            adds_bos=bos_id is not None
            and (config.get("add_bos_token") is True or leading == [bos_id]),
            eos_ids=() if eos_id is None else (eos_id,),
            byte_level=_is_byte_level(spec),
        )

    def encode(
        self, text: str, *, parse_special: bool = False, add_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: Any text without lone surrogates.
            parse_special: Read control tokens written in the text as such.
            add_special: Put the model's BOS first if it expects one and the text lacks it.

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        ids = self.encode_pieces(self.split_special(text) if parse_special else [text])
        if add_special and self.adds_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)  # type: ignore[arg-type] # adds_bos says that it exists
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """``text`` cut at control tokens: plain pieces as text, control tokens as ids."""
        pieces: list[str | int] = []
        start = 0
        for match in self._control_re.finditer(text):
            if match.start() > start:
                pieces.append(text[start : match.start()])
            pieces.append(self.control[match.group()])
            start = match.end()
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Ids of a sequence of plain texts and token ids."""
        pieces = list(pieces)
        texts = [piece for piece in pieces if isinstance(piece, str)]
        try:
            encoded = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False))
        except (UnicodeEncodeError, TypeError):
            raise RequestError(
                "the text holds a lone surrogate, which is no character",
                seen=next((t for t in texts if not _is_utf8(t)), None),
                fix="send valid Unicode",
            ) from None
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(next(encoded).ids)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """The bytes that ``ids`` stand for; control tokens give none if ``skip_special``."""
        table = self._table()
        skipped: frozenset[int] = self._control_ids if skip_special else frozenset()
        return b"".join(table[i] for i in ids if 0 <= i < len(table) and i not in skipped)

    def token_text(self, token_id: int) -> str:
        """One token as text, control tokens included: for logprobs and reports."""
        return self.decode([token_id], skip_special=False)

    def is_control(self, token_id: int) -> bool:
        """Whether the token is a control token."""
        return token_id in self._control_ids

    def _table(self) -> list[bytes]:
        if self._bytes is None:
            self._bytes = self._make_table()
        return self._bytes

    def _make_table(self) -> list[bytes]:
        table = [b""] * self.vocab
        to_bytes = _byte_level_bytes if self._byte_level else _byte_fallback_bytes
        for text, i in self._backend.get_vocab(with_added_tokens=False).items():
            table[i] = to_bytes(text)
        for i, token in self._backend.get_added_tokens_decoder().items():
            table[i] = token.content.encode()
        for text, i in self.control.items():
            table[i] = text.encode()
        return table


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file.

    Raises:
        CorruptFileError: not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{path.name} is not JSON", seen=str(error), fix="fetch the model again"
        ) from None
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path.name} is not a JSON object", seen=type(value).__name__)
    return value


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_byte_level(spec: Mapping[str, object]) -> bool:
    decoder = json.dumps(spec.get("decoder"))
    if '"ByteLevel"' in decoder:
        return True
    if '"ByteFallback"' in decoder:
        return False
    raise UnsupportedModelError(
        "tokenizer.json decodes by neither byte level nor byte fallback", seen=decoder
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (``bytes_to_unicode`` of its encoder.py), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = str.maketrans({char: chr(byte) for char, byte in _byte_alphabet().items()})


def _byte_level_bytes(token: str) -> bytes:
    mapped = token.translate(_ALPHABET)
    # A token with a character outside the alphabet was put in as text.
    return mapped.encode("latin-1") if max(mapped, default="") < "\u0100" else token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.match(token):
        return bytes([int(match.group(1), 16)])
    return token.replace("▁", " ").encode()


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
