"""``rayformer replay``: the story of an attempt, from its journal, as the machine tells it again."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rayformer.control.journal import Line, ReplayError, Told, replay


def replay_command(journal: Path, attempt: int | None, as_json: bool) -> int:
    """Print the story of ``attempt``, the last one if None; 1 if the journal does not replay, after what did."""
    try:
        told, error = replay(_lines(journal), attempt), None
    except OSError as problem:
        print(f"error: {journal}: {problem.strerror}; name the journal.jsonl of a run", file=sys.stderr)
        return 1
    except ReplayError as problem:
        told, error = problem.told, problem
    print(json.dumps([asdict(one) for one in told], indent=2) if as_json else _columns(told))
    if error is None:
        return 0
    print(f"error: {journal}: {error}", file=sys.stderr)
    return 1


def _lines(journal: Path) -> list[Line]:
    """All lines, so that they can be counted: one that broke off is an empty one here."""
    lines: list[Line] = []
    for text in journal.read_bytes().split(b"\n"):
        try:
            values = json.loads(text)
        except ValueError:
            values = {}
        lines.append(values if isinstance(values, dict) else {})
    return lines


def _columns(told: Sequence[Told]) -> str:
    """One line for each event.

    12.345 s  g1  Running -> Draining     pp1 is lost: its process died
    """
    changes = [f"{one.before} -> {one.after}" if one.before != one.after else one.before for one in told]
    width = max(map(len, changes), default=0)
    return "\n".join(
        f"{one.since_s:10.3f} s  g{one.generation}  {change:{width}}  {one.words}" for one, change in zip(told, changes)
    )
