from __future__ import annotations

import pytest

from hullspeed.text.stream import TextStream
from hullspeed.text.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, text: str, **options: object) -> tuple[str, str | None]:
    stream = TextStream(tokenizer, **options)  # type: ignore[arg-type]
    shown = "".join(stream.push([token]) for token in tokenizer.encode(text))
    return shown + stream.finish(), stream.stopped


@pytest.mark.parametrize("stop", [" three", "ee", "two t", "e f", "\n"])
def test_a_stop_string_in_any_place(smollm2_tokenizer: Tokenizer, stop: str) -> None:
    text = "one two three four\nfive"
    shown, stopped = run(smollm2_tokenizer, text, stop=[stop])
    assert shown == text.partition(stop)[0]
    assert stopped == stop


def test_tokens_after_the_stop_are_not_shown(smollm2_tokenizer: Tokenizer) -> None:
    stream = TextStream(smollm2_tokenizer, stop=["two"])
    assert stream.push(smollm2_tokenizer.encode("one two three")) == "one "
    assert stream.push(smollm2_tokenizer.encode(" more")) == ""
    assert stream.finish() == ""


def test_min_tokens_arms_late(smollm2_tokenizer: Tokenizer) -> None:
    text = "a. b. c. d."
    n_tokens = len(smollm2_tokenizer.encode("a. b."))
    shown, stopped = run(smollm2_tokenizer, text, stop=["."], min_tokens=n_tokens)
    assert (shown, stopped) == ("a. b. c", ".")


def test_what_only_looked_like_a_stop_is_not_lost(smollm2_tokenizer: Tokenizer) -> None:
    assert run(smollm2_tokenizer, "so the en", stop=["end"]) == ("so the en", None)


def test_control_tokens_are_shown_on_request(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("a<|im_end|>", parse_special=True)
    assert TextStream(smollm2_tokenizer).push(ids) == "a"
    assert TextStream(smollm2_tokenizer, skip_special=False).push(ids) == "a<|im_end|>"
