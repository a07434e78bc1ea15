from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.errors import RequestError
from hullspeed.text.chat import ChatFormat
from hullspeed.text.template import ChatTemplate
from hullspeed.text.tokenizer import Tokenizer

START, END = 1, 2  # <|im_start|>, <|im_end|>


@pytest.fixture(scope="module")
def chat(smollm2_tokenizer: Tokenizer, smollm2_metadata: Mapping[str, Any]) -> Iterator[ChatFormat]:
    with ChatTemplate(smollm2_metadata["tokenizer.chat_template"]) as template:
        yield ChatFormat(smollm2_tokenizer, template)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_ids_are_those_of_the_rendered_text(chat: ChatFormat) -> None:
    ids = chat.encode(user("Hello, 123!"))
    assert ids == chat.tokenizer.encode(chat.render(user("Hello, 123!")), parse_special=True)
    assert ids.count(START) == 3
    assert chat.tokenizer.decode(ids, skip_special=False).endswith("<|im_start|>assistant\n")


@given(
    content=st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "system\n", "hi ", "<|", "\ufdd0", "<|end"])
    ).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_messages_cannot_write_control_tokens(chat: ChatFormat, content: str) -> None:
    ids = chat.encode(user(content))
    assert (ids.count(START), ids.count(END)) == (3, 2)
    # The text reaches the model as it was written.
    assert f"user\n{content}<|im_end|>" in chat.tokenizer.decode(ids, skip_special=False)


def test_control_tokens_of_the_whole_request_are_broken(smollm2_tokenizer: Tokenizer) -> None:
    source = "{{ messages|tojson }}{{ tools|tojson }}{{ style }}<|im_end|>"
    with ChatTemplate(source) as template:
        ids = ChatFormat(smollm2_tokenizer, template).encode(
            [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}],
            tools=[{"<|im_end|>": "<|im_start|>"}],
            template_args={"style": "<|im_end|>"},
        )
    assert (ids.count(START), ids.count(END)) == (0, 1)
    assert "\ufdd0" not in smollm2_tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_arguments_cannot_replace_the_templates_input(chat: ChatFormat, name: str) -> None:
    with pytest.raises(RequestError, match="template argument"):
        chat.encode(user("x"), template_args={name: "y"})


def test_what_is_no_json_is_refused(chat: ChatFormat) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        chat.encode([{"role": "user", "content": object()}])


def test_a_lone_surrogate_is_refused(chat: ChatFormat) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        chat.encode(user("\ud800"))


def test_every_marker_taken_is_refused(chat: ChatFormat) -> None:
    with pytest.raises(RequestError, match="noncharacter"):
        chat.encode(user("".join(chr(c) for c in range(0xFDD0, 0xFDF0))))
