"""Server-sent events, read strictly and completely.

The rules are those of the HTML standard, section "Parsing an event stream": lines end with LF,
CRLF or CR; lines that start with a colon are comments; an event is dispatched by an empty line;
several ``data`` lines join with LF; what is left undispatched when the stream ends is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """One dispatched event."""

    data: str
    event: str = "message"


class SseParser:
    """Turns bytes into events; how the bytes are cut into pieces makes no difference.

    Bytes that are not UTF-8 become U+FFFD, as the standard has it. A character that is split
    between two pieces is whole again, because lines are decoded only when they are complete.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[str] = []
        self._event = ""

    @property
    def pending(self) -> bool:
        """Whether a started event or line has not been dispatched: a stream cut short."""
        return bool(self._tail or self._data)

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """The events that ``piece`` completes."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if piece.endswith(b"\r"):
            self._after_cr = True
        lines = (self._tail + piece).splitlines(keepends=True)
        self._tail = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._tail = lines.pop()
        events = []
        for line in lines:
            event = self._line(line.rstrip(b"\r\n"))
            if event is not None:
                events.append(event)
        return events

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if self._at_start:
            line = line.removeprefix(_BOM)
            self._at_start = False
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None  # comments have an empty name; id and retry do not matter here

    def _dispatch(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return ServerSentEvent("\n".join(data), event or "message") if data else None
