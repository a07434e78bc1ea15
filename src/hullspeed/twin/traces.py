"""traces: recorded traffic as workloads. Lengths, times and shared prefixes; never text.

Formats: ``mooncake`` (JSONL with hashes of 512-token blocks), ``azure`` (CSV of 2023 and 2024),
``burstgpt`` (CSV), ``weka`` (CSV of agent sessions), ``sharegpt`` (JSON of conversations, as
benchmark scripts take it), ``custom`` (JSONL of prompts, likewise) and ``hullspeed`` (our JSONL).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import msgspec

from hullspeed.errors import UsageError
from hullspeed.twin.datasets import custom, sharegpt
from hullspeed.twin.recorded import Blocks
from hullspeed.twin.rows import Row, csv_rows, jsonl_rows
from hullspeed.twin.workload import Contents, Part, Session, Turn, Workload, of_turns, total_tokens

MOONCAKE_BLOCK_TOKENS = 512
WEKA_BLOCK_TOKENS = 64
OWN_CONTENTS = 1 << 40
"""Content numbers in files are smaller; those that a reader makes up start here."""


def load_trace(path: Path, kind: str) -> Workload:
    """The workload in ``path``.

    Raises:
        UsageError: for an unknown format, a file that cannot be read, or a row that cannot be
            (naming its number).
    """
    reader = FORMATS.get(kind)
    if reader is None:
        raise UsageError("unknown trace format", seen=kind, fix=f"use {', '.join(FORMATS)}")
    workload = reader(path)
    if not workload.sessions:
        raise UsageError("the trace has no rows", seen=str(path))
    return workload


def thinned(workload: Workload, requests: int, seed: int = 0) -> Workload:
    """About ``requests`` requests in whole sessions, drawn at random, in their old order; what is
    left keeps its times, so traffic gets thinner.

    Raises:
        UsageError: for fewer than one request.
    """
    if requests < 1:
        raise UsageError("keep at least one request", seen=requests)
    if requests >= workload.n_requests:
        return workload
    order = list(range(len(workload.sessions)))
    random.Random(seed).shuffle(order)  # noqa: S311 - a sample, not a secret
    kept, n_requests = [], 0
    for index in order:
        if n_requests >= requests:
            break
        kept.append(index)
        n_requests += len(workload.sessions[index].turns)
    sessions = tuple(workload.sessions[index] for index in sorted(kept))
    return msgspec.structs.replace(workload, sessions=sessions)


def first(workload: Workload, requests: int) -> Workload:
    """Sessions from the start until ``requests`` requests are reached, at their own rate."""
    sessions, n_requests = [], 0
    for session in sorted(workload.sessions, key=lambda s: s.at_s):
        if n_requests >= requests:
            break
        sessions.append(session)
        n_requests += len(session.turns)
    return msgspec.structs.replace(workload, sessions=tuple(sessions))


def spread(times_s: list[float]) -> list[float]:
    """Times of a coarse grid spread evenly over the grid's step, in their order.

    The step is the smallest gap between different times; requests that share a time would else
    arrive as a burst that never was.
    """
    distinct = sorted(set(times_s))
    step = min((b - a for a, b in pairwise(distinct)), default=0.0)
    counts: dict[float, int] = {}
    for time_s in times_s:
        counts[time_s] = counts.get(time_s, 0) + 1
    seen: dict[float, int] = {}
    out = []
    for time_s in times_s:
        place = seen.get(time_s, 0)
        seen[time_s] = place + 1
        out.append(time_s + step * place / counts[time_s])
    return out


def _mooncake(path: Path) -> Workload:
    turns, times = [], []
    contents = Contents(OWN_CONTENTS)
    for row in jsonl_rows(path):
        times.append(row.number_of("timestamp") / 1e3)
        n_tokens = row.tokens("input_length")
        hashes = row.get("hash_ids")
        blocks = -(-n_tokens // MOONCAKE_BLOCK_TOKENS)
        if not isinstance(hashes, list) or len(hashes) != blocks:
            raise row.wrong(
                f"{n_tokens} tokens need {blocks} hash_ids",
                seen=len(hashes) if isinstance(hashes, list) else hashes,
            )
        if not all(isinstance(h, int) and 0 <= h < OWN_CONTENTS - 1 for h in hashes):
            raise row.wrong("hash_ids are whole numbers", seen=hashes[:8])
        parts = [Part(h + 1, MOONCAKE_BLOCK_TOKENS) for h in hashes]
        parts[-1] = Part(parts[-1].content, n_tokens - (blocks - 1) * MOONCAKE_BLOCK_TOKENS)
        turns.append(
            Turn(
                prompt=tuple(parts),
                osl_tokens=row.tokens("output_length"),
                answer=contents.new(),
                checkpoints=(n_tokens,),
            )
        )
    return of_turns(path.stem, zip(spread(times), turns, strict=True))


def _azure(path: Path) -> Workload:
    turns, times = [], []
    contents = Contents()
    start: datetime | None = None
    for row in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        at = _date(row)
        start = start or at
        times.append((at - start).total_seconds())
        if times[-1] < 0:
            raise row.wrong("earlier than the first row", seen=row.get("TIMESTAMP"))
        turns.append(_plain(contents, row.tokens("ContextTokens"), row.tokens("GeneratedTokens")))
    return of_turns(path.stem, zip(times, turns, strict=True))


def _date(row: Row) -> datetime:
    text = str(row.get("TIMESTAMP")).replace("+00:00", "").rstrip("Z")
    head, _, digits = text.partition(".")
    try:
        return datetime.fromisoformat(f"{head}.{digits[:6]:0<6}")
    except ValueError:
        raise row.wrong("TIMESTAMP is not a date and time", seen=text) from None


def _burstgpt(path: Path) -> Workload:
    turns, times = [], []
    contents = Contents()
    for row in csv_rows(path, ("Timestamp", "Request tokens", "Response tokens")):
        at_s = row.number_of("Timestamp")
        osl = row.tokens("Response tokens", least=0)
        if osl == 0:  # the trace's failed requests
            continue
        times.append(at_s)
        turns.append(_plain(contents, row.tokens("Request tokens"), osl))
    begin = min(times, default=0.0)
    return of_turns(path.stem, zip(spread([t - begin for t in times]), turns, strict=True))


def _plain(contents: Contents, isl: int, osl: int) -> Turn:
    return Turn(
        prompt=(Part(contents.new(), isl),),
        osl_tokens=osl,
        answer=contents.new(),
        checkpoints=(isl,),
    )


def _weka(path: Path) -> Workload:
    """Sessions of the agent trace; each request repeats the start of an earlier one of its session
    as far as the trace's counts of repeated blocks say.
    """
    sessions: dict[str, list[Turn]] = {}
    contents = Contents()
    needed = ("trace", "in", "out", "prefix_blocks_hit_session", "think_time")
    for row in csv_rows(path, needed):
        turns = sessions.setdefault(str(row.get("trace")), [])
        n_tokens = row.tokens("in")
        hit = row.tokens("prefix_blocks_hit_session", least=0) * WEKA_BLOCK_TOKENS
        shared = _beginning(turns, min(hit, n_tokens - 1))
        prompt = (*shared, Part(contents.new(), n_tokens - total_tokens(shared)))
        turns.append(
            Turn(
                prompt=prompt,
                osl_tokens=max(1, row.tokens("out", least=0)),
                answer=contents.new(),
                # Empty where the trace's sub-agents overlap: sent at once.
                wait_s=row.number_of("think_time") if turns and row.fields["think_time"] else 0.0,
                checkpoints=(n_tokens,),
            )
        )
    return Workload(
        name=path.stem,
        sessions=tuple(Session(turns=tuple(turns)) for turns in sessions.values()),
        concurrency=len(sessions),
    )


def _beginning(turns: list[Turn], n_tokens: int) -> tuple[Part, ...]:
    """The first ``n_tokens`` tokens of the latest prompt that is as long, or of the longest."""
    if not turns or n_tokens < 1:
        return ()
    source = next((t for t in reversed(turns) if t.isl_tokens >= n_tokens), None)
    source = source or max(turns, key=lambda turn: turn.isl_tokens)
    parts: list[Part] = []
    left = n_tokens
    for part in source.prompt:
        if left <= 0:
            break
        parts.append(Part(part.content, min(part.n_tokens, left)))
        left -= part.n_tokens
    return tuple(parts)


def _ours(path: Path) -> Workload:
    """``{"at_s", "isl", "osl", "session", "wait_s", "checkpoints"}``, and what prompts share as
    ``"prompt": [[content, tokens], ...]`` (outputs: ``"answer"`` or ``"said"``) or as the
    ``"blocks"`` that ``hullspeed serve --record`` writes. Rows of one session follow each other,
    the first one starts it. A recorded request that ended without a token is left out: how far its
    prompt was computed is not known.
    """
    sessions: dict[str, list[Turn]] = {}
    starts: dict[str, float] = {}
    contents = Contents(OWN_CONTENTS)
    blocks = Blocks(contents)
    for row in jsonl_rows(path):
        said: tuple[Part, ...] = ()
        if "blocks" in row.fields:
            prompt, said = blocks.read(row)
            if row.fields.get("osl") == 0:
                continue
        else:
            prompt = _parts(row, contents)
            said = _pairs(row, "said") if "said" in row.fields else ()
            if said and total_tokens(said) != row.tokens("osl"):
                raise row.wrong("said is not osl tokens", seen=total_tokens(said))
        name = str(row.fields.get("session", f"row {row.number}"))
        isl = total_tokens(prompt)
        places = row.fields.get("checkpoints", [isl])
        if not isinstance(places, list) or not all(
            isinstance(p, int) and 0 < p <= isl for p in places
        ):
            raise row.wrong("checkpoints are positions within the prompt", seen=places)
        turns = sessions.setdefault(name, [])
        if not turns:
            starts[name] = row.number_of("at_s") if "at_s" in row.fields else 0.0
        turns.append(
            Turn(
                prompt=prompt,
                osl_tokens=row.tokens("osl"),
                answer=_content(row) if "answer" in row.fields else contents.new(),
                wait_s=row.number_of("wait_s") if "wait_s" in row.fields else 0.0,
                checkpoints=tuple(sorted(places)),
                said=said,
            )
        )
    found = [Session(turns=tuple(turns), at_s=starts[name]) for name, turns in sessions.items()]
    # A server writes a request when it ends, which need not be the order in which they came.
    return Workload(name=path.stem, sessions=tuple(sorted(found, key=lambda s: s.at_s)))


def _parts(row: Row, contents: Contents) -> tuple[Part, ...]:
    if "prompt" not in row.fields:
        return (Part(contents.new(), row.tokens("isl")),)
    return _pairs(row, "prompt")


def _pairs(row: Row, name: str) -> tuple[Part, ...]:
    pairs = row.get(name)
    good = isinstance(pairs, list) and pairs and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair)
        for pair in pairs
    )  # fmt: skip
    if not good:
        raise row.wrong(f"{name} is a list of [content, tokens] pairs, both above 0", seen=pairs)
    return tuple(Part(content, n_tokens) for content, n_tokens in pairs)


def _content(row: Row) -> int:
    number = row.get("answer")
    if not isinstance(number, int) or not 0 < number < OWN_CONTENTS:
        raise row.wrong("answer is a content number, above 0", seen=number)
    return number


def write_trace(workload: Workload, path: Path) -> None:
    """Write our own format, which :func:`load_trace` reads back."""
    path.write_text(trace_text(workload), encoding="utf-8")


def trace_text(workload: Workload) -> str:
    """The workload in our own format."""
    lines = []
    number_of = _file_numbers(workload)

    def pairs(parts: Iterable[Part]) -> list[list[int]]:
        return [[number_of(part.content), part.n_tokens] for part in parts]

    for number, session in enumerate(workload.sessions):
        for index, turn in enumerate(session.turns):
            row: dict[str, object] = {"session": str(number)}
            if index == 0:
                row["at_s"] = session.at_s
            if turn.wait_s:
                row["wait_s"] = turn.wait_s
            row |= {
                "prompt": pairs(turn.prompt),
                "osl": turn.osl_tokens,
                "answer": number_of(turn.answer),
                "checkpoints": list(turn.checkpoints),
            }
            if turn.said:
                row["said"] = pairs(turn.said)
            lines.append(msgspec.json.encode(row).decode())
    return "\n".join(lines) + "\n"


def _file_numbers(workload: Workload) -> Callable[[int], int]:
    """Content numbers as they are, and after them those that a reader made up."""
    used: dict[int, None] = {}
    for session in workload.sessions:
        for turn in session.turns:
            used.update((part.content, None) for part in (*turn.prompt, *turn.said))
            used[turn.answer] = None
    kept = max((number for number in used if number < OWN_CONTENTS), default=0)
    made_up = [number for number in used if number >= OWN_CONTENTS]
    renamed = {number: kept + place for place, number in enumerate(made_up, 1)}
    return lambda number: renamed.get(number, number)


FORMATS: dict[str, Callable[[Path], Workload]] = {
    "hullspeed": _ours,
    "mooncake": _mooncake,
    "azure": _azure,
    "burstgpt": _burstgpt,
    "weka": _weka,
    "sharegpt": sharegpt,
    "custom": custom,
}
