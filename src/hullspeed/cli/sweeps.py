"""sweeps: many configurations of one question, kept as they come if asked to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hullspeed.report.blocks import Report
    from hullspeed.twin.question import Outcome, Question
    from hullspeed.twin.summary import Objective
    from hullspeed.twin.workload import Workload


def many(
    question: Question,
    workload: Workload,
    objective: Objective,
    options: dict[str, Any],
    title: str,
) -> tuple[dict[str, Any], Report]:
    """Of every combination of ``--sweep``, or every change of ``--what-if``."""
    from hullspeed.plan.capacity import memory_of
    from hullspeed.report.compared import sweep_report
    from hullspeed.twin.question import pareto
    from hullspeed.twin.sweep import expand, parse_axes, what_if

    price = options["price"]
    if options["what_if"]:
        questions = what_if(question, memory_of, price)
    else:
        questions = expand(question, parse_axes(options["sweep"]), memory_of, price)
    outcomes = _outcomes(question, questions, workload, objective, options)
    front = pareto(outcomes)
    report = sweep_report(title, outcomes, front, objective, ranked=options["what_if"])
    data = {
        "cost_model": question.cost().model,
        "outcomes": outcomes,
        "pareto": [o.label for o in outcomes if o.label in front],
    }
    return data, report


def _outcomes(
    base: Question,
    questions: list[Question],
    workload: Workload,
    objective: Objective,
    options: dict[str, Any],
) -> list[Outcome]:
    """Of every question; with --resume only those are simulated that its file does not hold."""
    from hullspeed.twin.fanout import answers
    from hullspeed.twin.kept import Kept, sweep_key

    kept, path = None, options["resume"]
    if path is not None:
        kept = Kept(path, sweep_key(base, questions, workload, objective), len(questions))
    found = dict(kept.outcomes) if kept else {}
    places = [place for place in range(len(questions)) if place not in found]
    if found:
        sys.stderr.write(f"{len(found)} of {len(questions)} configurations are in {path}\n")

    def progress(done: int) -> None:
        if done % 50 == 0 or done == len(places):
            sys.stderr.write(
                f"{len(questions) - len(places) + done} of {len(questions)} configurations\n"
            )

    def keep(index: int, outcome: Outcome) -> None:
        found[places[index]] = outcome
        if kept is not None:
            kept.add(places[index], outcome)

    left = [questions[place] for place in places]
    workers, ray = options["workers"], options["ray"]
    try:
        if left:
            answers(left, workload, objective, workers=workers, ray=ray, progress=progress,
                    keep=keep)  # fmt: skip
    except KeyboardInterrupt:
        where = f"they are in {path}: the same command goes on from there"
        if kept is None:
            where = "nothing is kept (--resume FILE would)"
        sys.stderr.write(f"{len(found)} of {len(questions)} configurations were done; {where}\n")
        raise
    finally:
        if kept is not None:
            kept.close()
    return [found[place] for place in range(len(questions))]
