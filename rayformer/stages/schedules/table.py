"""A schedule that a user writes down: one line per rank, in the words of the drawings."""

from __future__ import annotations

import re

from rayformer.errors import ConfigError, Problem
from rayformer.stages.instructions import Backward, Compute, Forward, InputGrad, WeightGrad

KEY = "schedule.table"
WORDS = "write F3, B3 and W3, or F3c1 for chunk 1; where there is a W, B is the gradient of the input alone"


def from_table(text: str) -> tuple[tuple[Compute, ...], ...]:
    """The orders that ``text`` lists, a line for each rank; dots, dashes and a name ``pp0`` before a line say nothing.

    So a drawing is a table too. Raises ConfigError for a word that is none.

    >>> from_table('''pp0 F0 .  B0
    ...               pp1 .  F0 B0''')[1]
    (Forward(microbatch=0, chunk=0, part=None), Backward(microbatch=0, chunk=0, part=None))
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError([Problem(keys={KEY: text}, rule="it has a line for no rank", fix=WORDS)])
    rows = [[word.rstrip("-") for word in line if word.strip(".-")] for line in lines]
    rows = [row[1:] if row and re.fullmatch(r"(pp|r)?\d+:?", row[0]) else row for row in rows]
    split = any(word.startswith("W") for row in rows for word in row)
    return tuple(tuple(_op(word, rank, split) for word in row) for rank, row in enumerate(rows))


def _op(word: str, rank: int, split: bool) -> Compute:
    found = re.fullmatch(r"([FBW])(\d+)(?:c(\d+))?", word)
    if found is None:
        raise ConfigError([Problem(keys={KEY: word}, rule=f"the line of pp{rank} has a word that is none", fix=WORDS)])
    letter, v, chunk = found[1], int(found[2]), int(found[3] or 0)
    kinds: dict[str, type[Compute]] = {"F": Forward, "B": InputGrad if split else Backward, "W": WeightGrad}
    return kinds[letter](v, chunk)
