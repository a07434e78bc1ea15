from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.text.detokenizer import Detokenizer
from hullspeed.text.tokenizer import Tokenizer


@given(ids=st.lists(st.integers(0, 49151), max_size=40), data=st.data())
@settings(max_examples=200, deadline=None)
def test_pushed_text_joined_is_the_decoded_whole(
    smollm2_tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    stream = Detokenizer(smollm2_tokenizer)
    text, start = "", 0
    while start < len(ids):
        size = data.draw(st.integers(1, 5))
        text += stream.push(ids[start : start + size])
        start += size
    assert text + stream.finish() == smollm2_tokenizer.decode(ids)


# Of these SmolLM2 has every byte.
KNOWN = st.characters(
    max_codepoint=0x3FFFF,
    exclude_categories=["Cs"],
    exclude_characters="\x04\x06\x13\x14\x16\x1d\ufffd",
)


@given(text=st.text(KNOWN))
@settings(max_examples=200, deadline=None)
def test_a_character_is_never_shown_in_halves(smollm2_tokenizer: Tokenizer, text: str) -> None:
    stream = Detokenizer(smollm2_tokenizer)
    shown = ""
    for token in smollm2_tokenizer.encode(text):
        shown += stream.push([token])
        assert "\ufffd" not in shown
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def test_half_a_character_at_the_end_becomes_the_replacement(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("ok 🤷")
    stream = Detokenizer(smollm2_tokenizer)
    assert stream.push(ids[:-1]).startswith("ok")
    assert stream.finish() == "\ufffd"


def test_time_per_token_does_not_grow(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("the quick brown fox ") * 4000
    stream = Detokenizer(smollm2_tokenizer)

    def seconds(part: list[int]) -> float:
        begin_s = time.thread_time()
        for token in part:
            stream.push([token])
        return time.thread_time() - begin_s

    half = len(ids) // 2
    first_s = seconds(ids[:half])
    assert seconds(ids[half:]) <= 5 * first_s + 0.05  # ticks of coarse clocks
