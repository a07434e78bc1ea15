from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hullspeed.sse import ServerSentEvent, SseParser


def parse(*pieces: bytes) -> list[ServerSentEvent]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_line_ends_and_comments() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        stream = end.join([b": ping", b"data: a", b"", b": ping", b"data:b", b"data: c", b"", b""])
        assert [event.data for event in parse(stream)] == ["a", "b\nc"]


def test_event_names_and_unknown_fields() -> None:
    stream = b"event: error\nid: 7\nretry: 10\nwhatever\ndata: x\n\ndata: y\n\n"
    assert parse(stream) == [ServerSentEvent("x", "error"), ServerSentEvent("y")]


def test_byte_order_mark_is_skipped_once() -> None:
    assert [event.data for event in parse(b"\xef\xbb\xbfdata: a\n\n")] == ["a"]


def test_an_undispatched_event_is_dropped_and_told() -> None:
    parser = SseParser()
    assert parser.feed(b"data: [DONE]\n") == []
    assert parser.pending


def test_only_one_leading_space_is_removed() -> None:
    assert parse(b"data:  two\n\n")[0].data == " two"


def test_invalid_utf8_is_replaced() -> None:
    assert parse(b"data: \xff\n\n")[0].data == "\ufffd"


lines = st.sampled_from([
    "data: héllo 🦊", "data:", "data: {\"a\":1}", ": c", "event: x", "", "", "junk", "data: [DONE]",
    "data: \u2028 not a line end \x0b\x0c\x85",
])  # fmt: skip
ends = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(st.tuples(lines, ends), max_size=12), st.data())
def test_any_split_of_the_bytes_gives_the_same_events(
    content: list[tuple[str, str]], data: st.DataObject
) -> None:
    stream = "".join(line + end for line, end in content).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [
        stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
    whole = parse(stream)
    assert parse(*pieces) == whole
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == whole
    assert parse(*(stream[i : i + 7] for i in range(0, len(stream), 7))) == whole
