"""The text side of a model for the API process: found, read and ready, without torch."""

from __future__ import annotations

from pathlib import Path

from hullspeed.server.service import Texts
from hullspeed.sources.resolve import resolve
from hullspeed.text.chat import ChatFormat
from hullspeed.text.model_text import read_model_text
from hullspeed.text.template import ChatTemplate


def load_texts(model: str) -> Texts:
    """Tokenizer and chat format of ``model``; blocks (0.1 to 1 s).

    Raises:
        ModelError: the files are missing, corrupt or not supported.
    """
    files = resolve(model)
    path: Path = files.weights[0] if files.kind == "gguf" else files.root
    text = read_model_text(path)
    chat = None
    if text.template is not None:
        chat = ChatFormat(text.tokenizer, ChatTemplate(text.template))
    return Texts.of(text.tokenizer, chat)
