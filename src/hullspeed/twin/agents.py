"""agents: conversations with a shared system prompt, think times, and thinking that is stripped.

A turn's prompt is the system block, everything said before, the new user or tool message, and the
generation tail (``<|im_start|>assistant`` and what follows). The model thinks and answers; the
template drops the thinking, so the next prompt repeats the answer but not what was generated: it
shares a prefix with this prompt up to the tail, and nothing with the output.
"""

from __future__ import annotations

import math
import random

import msgspec

from hullspeed.errors import UsageError
from hullspeed.twin.workload import Contents, Part, Session, Turn, Workload, total_tokens


class AgentLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Agent sessions. Medians and sigmas are of lognormal distributions.

    Attributes:
        system_tokens: Shortest and longest of the ``n_systems`` shared system prompts; those
            between grow by equal ratios.
        turns: Shortest and longest session, in requests.
        message_tokens: Median of a user or tool message; ``message_sigma`` its spread.
        answer_tokens: Median of the visible answer; thinking is drawn on top of it.
        think_s: Median of the time between an answer and the next request.
        over_s: Sessions start at even odds within this time.
        tail_tokens: Of the generation prompt at the end.
        strip_thinking: Whether the template drops earlier thinking.
    """

    sessions: int = 160
    n_systems: int = 4
    system_tokens: tuple[int, int] = (3_000, 9_000)
    turns: tuple[int, int] = (3, 16)
    message_tokens: int = 410
    message_sigma: float = 1.1
    answer_tokens: int = 90
    thinking_tokens: int = 250
    sigma: float = 0.8
    think_s: float = 20.0
    think_sigma: float = 1.3
    over_s: float = 3_400.0
    tail_tokens: int = 5
    strip_thinking: bool = True
    max_tokens: int = 120_000
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the field.
        """
        for name in ("sessions", "n_systems", "message_tokens", "answer_tokens", "tail_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} of agent sessions must be at least 1",
                                 seen=getattr(self, name))  # fmt: skip
        for name in ("system_tokens", "turns"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise UsageError(f"{name} is a range of at least 1", seen=(low, high))
        for name in ("think_s", "over_s", "thinking_tokens", "sigma", "message_sigma"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} of agent sessions cannot be negative",
                                 seen=getattr(self, name))  # fmt: skip


def agent_sessions(load: AgentLoad) -> Workload:
    """Sessions of ``load``, the same for the same seed.

    Raises:
        UsageError: for numbers that cannot be.
    """
    load.check()
    rng = random.Random(load.seed)  # noqa: S311 - a workload, not a secret
    contents = Contents()
    low, high = load.system_tokens
    ratio = (high / low) ** (1 / max(1, load.n_systems - 1))
    systems = [Part(contents.new(), round(low * ratio**i)) for i in range(load.n_systems)]
    starts = sorted(rng.uniform(0, load.over_s) for _ in range(load.sessions))
    sessions = tuple(
        Session(turns=_turns(load, rng, contents, rng.choice(systems)), at_s=at_s)
        for at_s in starts
    )
    return Workload(name=f"{load.sessions} agent sessions", sessions=sessions)


def _turns(
    load: AgentLoad, rng: random.Random, contents: Contents, system: Part
) -> tuple[Turn, ...]:
    said = [system]
    turns: list[Turn] = []
    for index in range(rng.randint(*load.turns)):
        said.append(Part(contents.new(), _draw(rng, load.message_tokens, load.message_sigma)))
        prompt = (*said, Part(contents.new(), load.tail_tokens))
        answer = Part(contents.new(), _draw(rng, load.answer_tokens, load.sigma))
        thinking = _draw(rng, load.thinking_tokens, load.sigma) if load.thinking_tokens else 0
        n_tokens = total_tokens(prompt)
        if turns and n_tokens + thinking + answer.n_tokens > load.max_tokens:
            break
        turns.append(
            Turn(
                prompt=prompt,
                osl_tokens=thinking + answer.n_tokens,
                answer=answer.content if not load.strip_thinking else contents.new(),
                wait_s=_seconds(rng, load) if index else 0.0,
                checkpoints=(system.n_tokens, n_tokens - load.tail_tokens),
            )
        )
        if load.strip_thinking:
            said.append(answer)
        else:
            said += [prompt[-1], Part(answer.content, thinking + answer.n_tokens)]
    return tuple(turns)


def _seconds(rng: random.Random, load: AgentLoad) -> float:
    return load.think_s * math.exp(rng.gauss(0, load.think_sigma))


def _draw(rng: random.Random, median: int, sigma: float) -> int:
    return max(1, round(median * math.exp(rng.gauss(0, sigma))))
