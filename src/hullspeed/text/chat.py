"""ChatFormat: messages to token ids, through the model's own template.

Control tokens written in a message are text, not control: a client cannot close its own turn with
``<|im_end|>``. Other engines tokenize the whole rendered text with control tokens parsed, so a
message that holds one steers the model. Here each control token inside a message is broken with a
marker before the template runs; the rendered text is cut at the control tokens that the template
itself wrote; the markers are taken out of what lies between, and that is tokenized as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hullspeed.errors import RequestError
from hullspeed.text.checkpoints import (
    DUMMY_TEXTS,
    MarkedPrompt,
    cut_text,
    leading_messages,
    raw_checkpoints,
    shared_chars,
)
from hullspeed.text.template import ChatTemplate
from hullspeed.text.tokenizer import Tokenizer

# Unicode noncharacters, "intended for process-internal uses" (Unicode 16, section 23.7).
_MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

# Names that a client may not set through template arguments: the template's own inputs.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)


class ChatFormat:
    """A tokenizer and a chat template that belong together.

    Args:
        special: Further values that templates of this model expect (``bos_token``, ...).
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, special: Mapping[str, str] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._special = dict(special if special is not None else special_texts(tokenizer))
        longest_first = sorted(tokenizer.control, key=len, reverse=True)
        self._control_re = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids for ``messages``; blocks while the template runs.

        Args:
            messages: As the template takes them: ``role``, ``content`` and what it knows more of.
            tools: Tool definitions, for templates that show them.
            add_generation_prompt: End with the opening of the assistant's turn.
            template_args: Further named values, such as ``enable_thinking``.

        Raises:
            RequestError: the template refuses the messages or breaks a limit.
        """
        marker = _unused_marker(messages, tools, template_args)
        text = self._render(messages, tools, add_generation_prompt, template_args, marker)
        pieces = [
            piece.replace(marker, "") if isinstance(piece, str) else piece
            for piece in self.tokenizer.split_special(text)
        ]
        # Templates write BOS themselves if they want it; those that do not, get none (as in
        # transformers' apply_chat_template).
        return self.tokenizer.encode_pieces(pieces)

    def encode_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> MarkedPrompt:
        """As :meth:`encode`, with the places worth a checkpoint of recurrent state; the template
        runs up to four times.

        Raises:
            RequestError: the template refuses the messages or breaks a limit.
        """
        marker = _unused_marker(messages, tools, template_args)
        text = self._render(messages, tools, add_generation_prompt, template_args, marker)
        places = []
        if add_generation_prompt:
            ended = self._try_render(messages, tools, template_args, marker)
            places.append(shared_chars(text, [ended]))
        leading = leading_messages(messages)
        if leading or tools:
            dummies = ({"role": "user", "content": dummy} for dummy in DUMMY_TEXTS)
            opened = [
                self._try_render([*leading, dummy], tools, template_args, marker)
                for dummy in dummies
            ]
            places.append(shared_chars(text, opened))
        starts = [match.start() for match in self._control_re.finditer(text)]
        tokens: list[int] = []
        ends = []
        for part in cut_text(text, places, starts):
            pieces = self.tokenizer.split_special(part)
            tokens += self.tokenizer.encode_pieces(
                piece.replace(marker, "") if isinstance(piece, str) else piece for piece in pieces
            )
            ends.append(len(tokens))
        return MarkedPrompt(tokens, tuple(ends[:-1]) or raw_checkpoints(len(tokens)))

    def _try_render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any] | None,
        marker: str,
    ) -> str:
        """Without a generation prompt; empty if the template does not take it, which only costs
        a checkpoint.
        """
        try:
            return self._render(messages, tools, False, template_args, marker)
        except RequestError:
            return ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text: for reading, as control tokens of messages are not told apart."""
        return self._render(messages, tools, add_generation_prompt, template_args, None)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any] | None,
        marker: str | None,
    ) -> str:
        args = dict(template_args or {})
        if taken := _RESERVED & args.keys():
            raise RequestError(
                "a template argument has a name that the template's own input uses",
                seen=sorted(taken)[0],
                param="chat_template_kwargs",
            )
        given = {"messages": list(messages), "tools": list(tools) if tools else None, **args}
        if marker is not None:
            given = self._broken(given, marker)
        own = {"add_generation_prompt": add_generation_prompt, "documents": None, **self._special}
        return self.template.render({**given, **own})

    def _broken(self, value: Any, marker: str) -> Any:
        """``value`` with every control token in its strings broken by ``marker``."""
        if isinstance(value, str):
            return self._control_re.sub(lambda m: m[0][0] + marker + m[0][1:], value)
        if isinstance(value, Mapping):
            return {self._broken(k, marker): self._broken(v, marker) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._broken(item, marker) for item in value]
        return value


def special_texts(tokenizer: Tokenizer) -> dict[str, str]:
    """``bos_token`` and ``eos_token`` as templates expect them."""
    texts = {}
    if tokenizer.bos_id is not None:
        texts["bos_token"] = tokenizer.token_text(tokenizer.bos_id)
    if tokenizer.eos_ids:
        texts["eos_token"] = tokenizer.token_text(tokenizer.eos_ids[0])
    return texts


def _unused_marker(*values: object) -> str:
    try:
        text = json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            "the messages are not JSON data", seen=str(error), param="messages"
        ) from None
    for marker in _MARKERS:
        if marker not in text:
            return marker
    raise RequestError("the messages hold every Unicode noncharacter", param="messages")
