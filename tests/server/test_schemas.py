from __future__ import annotations

from typing import Any

import pytest

from hullspeed.errors import RequestError
from hullspeed.server.schemas import HARMLESS, NEUTRAL, ChatRequest, CompletionRequest, parse

MESSAGES = [{"role": "user", "content": "hi"}]


def test_fields_are_in_one_group_only() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not known & HARMLESS
    assert not known & NEUTRAL.keys()
    assert not HARMLESS & NEUTRAL.keys()


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_fields_that_ask_nothing_are_accepted(field: str) -> None:
    for value in NEUTRAL[field]:
        parse(ChatRequest, {"messages": MESSAGES, field: value})


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_fields_that_are_not_served_are_refused_by_name(field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field} is not supported") as caught:
        parse(ChatRequest, {"messages": MESSAGES, field: {"type": "json_object", "x": 1}})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": MESSAGES, "max_tokens": "5"}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": True}, "max_tokens"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"messages": MESSAGES, "stream": "yes"}, "stream"),
        ({"messages": MESSAGES, "stop": 5}, "stop"),
        ({"messages": MESSAGES, "stop": [5]}, "stop[0]"),
        ({"messages": MESSAGES, "logit_bias": [1]}, "logit_bias"),
        ({"messages": MESSAGES, "stream_options": 1}, "stream_options"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
    ],
)  # fmt: skip
def test_wrong_types_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, body)
    assert caught.value.param == param
    assert "`" not in str(caught.value)


def test_unknown_fields_are_told_and_bounded() -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "user": "me", "zeta": 1, "alpha": 2}
    body |= {"bad\r\nheader: x": 1, "ü": 2, "x" * 100: 3}
    assert parse(ChatRequest, body)[1] == ("alpha", "zeta")
    many = {f"f{i:03}": 1 for i in range(100)}
    assert len(parse(ChatRequest, {"messages": MESSAGES, **many})[1]) == 16


def test_null_is_the_default() -> None:
    nulls: dict[str, Any] = {
        name: None for name in ChatRequest.__struct_fields__ if name != "messages"
    }
    assert parse(ChatRequest, {"messages": MESSAGES, **nulls}) == parse(
        ChatRequest, {"messages": MESSAGES}
    )
