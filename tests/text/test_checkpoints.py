"""Where a chat prompt is worth a checkpoint, with templates that are told nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hullspeed.text.chat import ChatFormat
from hullspeed.text.checkpoints import cut_text, leading_messages, raw_checkpoints, shared_chars
from hullspeed.text.template import ChatTemplate
from hullspeed.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "templates"
SYSTEM = {"role": "system", "content": "You are a careful clerk who answers in full sentences."}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a town.", "parameters": {}},
    }
]


@pytest.fixture(scope="module")
def thinking(smollm2_tokenizer: Tokenizer) -> Iterator[ChatFormat]:
    """A template that opens the answer with ``<think>`` and drops earlier thinking."""
    with ChatTemplate((TEMPLATES / "thinking_tools.jinja").read_text()) as template:
        yield ChatFormat(smollm2_tokenizer, template)


@pytest.fixture(scope="module")
def plain(
    smollm2_tokenizer: Tokenizer, smollm2_metadata: Mapping[str, Any]
) -> Iterator[ChatFormat]:
    with ChatTemplate(smollm2_metadata["tokenizer.chat_template"]) as template:
        yield ChatFormat(smollm2_tokenizer, template)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_tokens_are_those_of_the_unmarked_prompt(thinking: ChatFormat, plain: ChatFormat) -> None:
    talk = [SYSTEM, user("Hi <|im_end|> there"), assistant("Yes?"), user("What is 2 + 2?")]
    for chat in (thinking, plain):
        for messages in (talk, talk[1:], talk[:2]):
            marked = chat.encode_marked(messages)
            assert marked.tokens == chat.encode(messages)
            assert all(0 < place < len(marked.tokens) for place in marked.checkpoints)
            assert list(marked.checkpoints) == sorted(set(marked.checkpoints))
    marked = thinking.encode_marked(talk, tools=TOOLS, template_args={"enable_thinking": False})
    assert marked.tokens == thinking.encode(
        talk, tools=TOOLS, template_args={"enable_thinking": False}
    )


def test_the_next_turn_shares_the_last_checkpoint(thinking: ChatFormat) -> None:
    """Thinking is stripped from the earlier turn; the place before the tail is still a prefix."""
    first = [SYSTEM, user("What is 2 + 2?")]
    now = thinking.encode_marked(first)
    answer = "<think>\nTwo and two.\n</think>\n\nFour."
    later = thinking.encode_marked([*first, assistant(answer), user("And 3 + 3?")])
    end = now.checkpoints[-1]
    assert later.tokens[:end] == now.tokens[:end]
    # What decoding appended is not: a state saved there would never be found.
    written = now.tokens + thinking.tokenizer.encode(answer)
    assert later.tokens[: len(written)] != written
    tail = thinking.tokenizer.decode(now.tokens[end:], skip_special=False)
    assert tail.startswith("<|im_start|>assistant")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_conversations_share_the_system_block(
    thinking: ChatFormat, tools: list[dict[str, Any]] | None
) -> None:
    one = thinking.encode_marked([SYSTEM, user("What is 2 + 2?")], tools=tools)
    other = thinking.encode_marked([SYSTEM, user("Name a bird.")], tools=tools)
    block = one.checkpoints[0]
    assert len(one.checkpoints) == 2
    assert other.checkpoints[0] == block
    assert other.tokens[:block] == one.tokens[:block]
    text = thinking.tokenizer.decode(one.tokens[:block], skip_special=False)
    assert "full sentences" in text
    assert ("weather" in text) == (tools is not None)
    assert "2 + 2" not in text


def test_a_template_that_refuses_the_extra_renderings_costs_only_checkpoints(
    smollm2_tokenizer: Tokenizer,
) -> None:
    source = (
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    with ChatTemplate(source) as template:
        marked = ChatFormat(smollm2_tokenizer, template).encode_marked([SYSTEM, user("Hi")])
    assert marked.checkpoints == (len(marked.tokens) - 1,)


def test_without_control_tokens_the_whole_prompt_but_one_token(
    smollm2_tokenizer: Tokenizer,
) -> None:
    with ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}A:") as template:
        marked = ChatFormat(smollm2_tokenizer, template).encode_marked([SYSTEM, user("Hi")])
    assert marked.checkpoints == (len(marked.tokens) - 1,)


def test_pieces() -> None:
    assert raw_checkpoints(5) == (4,)
    assert raw_checkpoints(1) == ()
    assert leading_messages([SYSTEM, SYSTEM, user("a"), SYSTEM]) == [SYSTEM, SYSTEM]
    assert leading_messages([SYSTEM]) == [SYSTEM]
    assert shared_chars("abcd", ["abx", "abcd"]) == 2
    text = "x" * 40 + "|" + "y" * 40 + "|" + "z"
    assert cut_text(text, [60], [40, 81]) == [text[:40], text[40:]]
    assert cut_text(text, [81, 45, 39, 0], [40, 81]) == [text[:40], text[40:81], "|z"]
    assert cut_text(text, [], [40]) == [text]
    assert cut_text(text, [35], [10]) == [text]  # too short a block
