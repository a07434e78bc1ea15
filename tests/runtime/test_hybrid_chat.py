"""Conversations with a thinking model that has recurrent state (field cases E05, E07)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hullspeed.text.chat import ChatFormat
from hullspeed.text.template import ChatTemplate
from hullspeed.text.tokenizer import Tokenizer

from .hybrids import HybridCase, hybrid_case, run

TEMPLATE = Path(__file__).parents[1] / "text" / "templates" / "thinking_tools.jinja"
SYSTEM = {"role": "system", "content": "You are a careful clerk who answers in full sentences."}


@pytest.fixture(scope="module")
def chat(smollm2_tokenizer: Tokenizer) -> Iterator[ChatFormat]:
    with ChatTemplate(TEMPLATE.read_text()) as template:
        yield ChatFormat(smollm2_tokenizer, template)


@pytest.fixture(scope="module")
def hybrid(chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> HybridCase:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hybrid")
    kinds = ["linear_attention", "full_attention"]
    return hybrid_case(
        folder,
        "qwen3_5",
        num_hidden_layers=2,
        layer_types=kinds,
        vocab_size=chat.tokenizer.vocab,
    )


def test_every_turn_starts_from_the_end_of_the_prompt_before(
    chat: ChatFormat, hybrid: HybridCase
) -> None:
    """Earlier thinking is stripped, so nothing decoded is ever a prefix again."""
    loop = hybrid.loop(step_tokens=64, max_running=2)
    messages = [SYSTEM, {"role": "user", "content": "What is two plus two?"}]
    reached = 0
    for turn in range(4):
        tokens, checkpoints = chat.encode_marked(messages)
        (sequence,) = run(loop, [tokens], 6, [checkpoints])
        assert sequence.output == hybrid.uncached(tokens, 6)
        assert sequence.cached_tokens == reached
        reached = checkpoints[-1]
        answer = f"<think>\nThinking of turn {turn}.\n</think>\n\nFour, as ever."
        question = f"And what is {turn} plus one?"
        messages += [{"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": question}]


def test_another_conversation_starts_from_the_system_block_at_once(
    chat: ChatFormat, hybrid: HybridCase
) -> None:
    loop = hybrid.loop(step_tokens=64, max_running=2)
    for i, question in enumerate(("What is two plus two?", "Name a bird of the sea.")):
        tokens, checkpoints = chat.encode_marked([SYSTEM, {"role": "user", "content": question}])
        (sequence,) = run(loop, [tokens], 4, [checkpoints])
        assert sequence.cached_tokens == (checkpoints[0] if i else 0)
        assert sequence.output == hybrid.uncached(tokens, 4)
