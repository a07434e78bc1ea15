from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hullspeed.core.sampling import SamplingParams
from hullspeed.errors import EngineError
from hullspeed.runtime.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    ClearCache,
    Delta,
    FromEngine,
    Outputs,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
)
from hullspeed.runtime.wire import Frames, frame

MESSAGES: list[ToEngine] = [
    Submit(
        id=1, prompt=[1, 2], sampling=SamplingParams(stop=("a",), logit_bias={5: 1.5}), salt=b"x"
    ),
    Cancel([1, 2]),
    ClearCache(),
    Shutdown(),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.lists(st.integers(1, 40), max_size=30))
def test_messages_survive_any_cut(messages: list[ToEngine], sizes: list[int]) -> None:
    data = b"".join(map(frame, messages))
    frames: Frames[ToEngine] = Frames(ToEngine)
    got: list[ToEngine] = []
    for size in sizes:
        got += frames.feed(data[:size])
        data = data[size:]
    assert [*got, *frames.feed(data)] == messages


def test_deltas_survive() -> None:
    deltas = [
        Delta(1, [5]),
        Delta(2, [], finish="error", error="no", error_type="RequestError"),
        Delta(3, [7], logprobs=[(-0.5, ((7, -0.5), (8, -1.0)))], cached_tokens=0, queue_s=0.25),
    ]
    frames: Frames[FromEngine] = Frames(FromEngine)
    assert list(frames.feed(frame(Outputs(deltas)))) == [Outputs(deltas)]


@pytest.mark.parametrize(
    "body",
    [b"", b"\x00", b"\xc1", b"\x81\xa4type\xa4evil", b"\x80", b"(lp0\n.", b"\x80\x04N."],
    ids=str,
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    frames: Frames[ToEngine] = Frames(ToEngine)
    with pytest.raises(EngineError, match="malformed"):
        list(frames.feed(struct.pack("<I", len(body)) + body))


def test_the_other_sides_messages_are_refused() -> None:
    frames: Frames[FromEngine] = Frames(FromEngine)
    with pytest.raises(EngineError, match="malformed"):
        list(frames.feed(frame(Cancel([1]))))
    assert Ready.__struct_config__.tag == "ready"


def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    frames: Frames[ToEngine] = Frames(ToEngine)
    with pytest.raises(EngineError, match="too long"):
        list(frames.feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))
    with pytest.raises(EngineError, match="too long"):
        frame(bytes(MAX_FRAME_BYTES))
