"""datasets: prompt collections in the formats of vLLM's and SGLang's benchmark scripts.

They hold text and no times. Tokens are taken to be four bytes of UTF-8 each, which is near enough
for English prose and wrong for code and other scripts; exact lengths need the model's tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

from hullspeed.errors import UsageError
from hullspeed.twin.rows import Row, jsonl_rows
from hullspeed.twin.workload import Contents, Part, Session, Turn, Workload

BYTES_PER_TOKEN = 4
DEFAULT_OSL = 256


def sharegpt(path: Path) -> Workload:
    """``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]``: the first
    message is the prompt and the second sets the output length, as the benchmark scripts do.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(
            "the trace cannot be read", seen=str(path), fix=error.strerror or ""
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path.name}, row 1: not JSON", seen=str(error)) from error
    if not isinstance(data, list):
        raise UsageError(
            f"{path.name}, row 1: not a list of conversations", seen=type(data).__name__
        )
    contents = Contents()
    turns = []
    for number, entry in enumerate(data, 1):
        row = Row(path, number, entry if isinstance(entry, dict) else {})
        turns += _first_exchange(contents, row)
    return _sessions(path, turns)


def custom(path: Path) -> Workload:
    """``{"prompt": text, "output_tokens": n}`` a line (vLLM; ``prompt_tokens`` wins over the text),
    or ``{"conversations": [{"content": ...}, {"content": ...}]}`` a line (SGLang).
    """
    contents = Contents()
    turns = []
    for row in jsonl_rows(path):
        if "conversations" in row.fields:
            turns += _first_exchange(contents, row)
            continue
        if "prompt_tokens" in row.fields:
            isl = row.tokens("prompt_tokens")
        else:
            prompt = row.get("prompt")
            if not isinstance(prompt, str):
                raise row.wrong("prompt is not text", seen=prompt)
            isl = tokens_in(prompt)
        osl = row.tokens("output_tokens") if "output_tokens" in row.fields else DEFAULT_OSL
        turns.append(_turn(contents, isl, osl))
    return _sessions(path, turns)


def tokens_in(text: str) -> int:
    """The estimate, at least 1."""
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN))


def _first_exchange(contents: Contents, row: Row) -> list[Turn]:
    """Prompt and answer that a conversation begins with; none if it has no answer."""
    said = row.fields.get("conversations", row.fields.get("conversation"))
    if not isinstance(said, list):
        raise row.wrong("no list of conversations")
    if len(said) < 2:
        return []
    prompt, answer = (_text(row, message) for message in said[:2])
    return [_turn(contents, tokens_in(prompt), tokens_in(answer))]


def _text(row: Row, message: object) -> str:
    value = message.get("value", message.get("content")) if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise row.wrong("a message without text", seen=message)
    return value


def _turn(contents: Contents, isl: int, osl: int) -> Turn:
    return Turn(
        prompt=(Part(contents.new(), isl),),
        osl_tokens=osl,
        answer=contents.new(),
        checkpoints=(isl,),
    )


def _sessions(path: Path, turns: list[Turn]) -> Workload:
    """No times: a closed loop, all at once unless told otherwise."""
    sessions = tuple(Session(turns=(turn,)) for turn in turns)
    return Workload(name=path.stem, sessions=sessions, concurrency=max(1, len(sessions)))
