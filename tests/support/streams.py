"""Server-sent events of an OpenAI stream, read from an answer's text."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The JSON of every event; the string ``[DONE]`` as itself.

    Raises ``ValueError`` for anything that is not an event of one line.
    """
    found = []
    for block in text.split("\n\n")[:-1]:
        if not block.startswith("data: ") or "\n" in block:
            raise ValueError(f"not an event: {block!r}")
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def text_of(chunks: list[Any], index: int = 0) -> str:
    """The text that the chunks of one choice add up to."""
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"] if isinstance(chunk, dict) and "choices" in chunk else []:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text
