"""Which blocks of a model each stage holds: balanced by what the blocks cost, or as ``layout.stages`` draws it.

Blocks are numbered 0 for the input block, 1 to the number of layers for the layers, and then the output block. Stages
are counted from the model's input, as in StageMap.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, lcm

from rayformer.errors import ConfigError, Problem

MAX_SYMBOLS = 100_000
LETTERS = "use E for the embedding, t for a layer, L for the loss, | between stages, and x*n or (..)*n to repeat"


def split_blocks(stages: str, *, costs: Sequence[float], pp: int, chunks: int = 1) -> tuple[range, ...]:
    """The blocks of every stage, ``pp * chunks`` of them; ``costs`` are those of the blocks, in any unit.

    ``stages`` is ``auto`` or a drawing such as ``Ett|ttL``. Raises ConfigError for a drawing of another model.

    >>> split_blocks("auto", costs=[0, 1, 1, 1, 0], pp=2)
    (range(0, 3), range(3, 5))
    >>> split_blocks("auto", costs=[0, 1, 1, 1, 1, 2], pp=2)
    (range(0, 4), range(4, 6))
    >>> split_blocks("E|t*3|L", costs=[0, 1, 1, 1, 0], pp=3)
    (range(0, 1), range(1, 4), range(4, 5))
    """
    if stages == "auto":
        return balanced(costs, pp * chunks)
    if wrong := problems(stages, layers=len(costs) - 2, pp=pp, chunks=chunks):
        raise ConfigError(wrong)
    edges = [0, *accumulate(map(len, drawn(stages)))]
    return tuple(range(start, stop) for start, stop in pairwise(edges))


def balanced(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """The split with the smallest largest stage, of those the one with the smallest second largest, and so on.

    If several are equal in this too, earlier stages get more layers. Every stage has at least one layer; the input
    block goes with the first, the output block with the last. Costs are compared exactly, so that equal ones are equal.

    Solved from the end: the best split of layers i.. into k stages is a first stage i..j and the best split of layers
    j.. into k-1, since adding the same stage to two splits does not change which is better.
    """
    num_layers = len(costs) - 2
    assert 1 <= num_stages <= num_layers, f"{num_layers} layers do not fill {num_stages} stages"
    whole = _as_integers(costs)
    upto = [0, *accumulate(whole[1:-1])]

    def cost(start: int, stop: int) -> int:
        ends = whole[0] * (start == 0) + whole[-1] * (stop == num_layers)
        return upto[stop] - upto[start] + ends

    # best[i]: the costs of the stages that hold layers i.. from the largest to the smallest, and where they start
    best: dict[int, tuple[tuple[float, ...], tuple[int, ...]]]
    best = {i: ((cost(i, num_layers),), (i,)) for i in range(num_stages - 1, num_layers)}
    for k in range(2, num_stages + 1):
        rest, best = best, {}
        for i in range(num_stages - k, 1 if k == num_stages else num_layers - k + 1):
            best[i] = (inf,), ()
            for j in range(i + 1, num_layers - k + 2):
                if (first := cost(i, j)) > best[i][0][0]:
                    break
                later, starts = rest[j]
                ranked = tuple(sorted((first, *later), reverse=True))
                if ranked <= best[i][0]:
                    best[i] = ranked, (i, *starts)
    edges = [0, *(1 + layer for layer in best[0][1][1:]), len(costs)]
    return tuple(range(start, stop) for start, stop in pairwise(edges))


def problems(stages: str, *, layers: int, pp: int, chunks: int = 1) -> list[Problem]:
    """Why a model of so many layers can't be dealt to ``pp * chunks`` stages as ``layout.stages`` says."""
    if stages == "auto":
        return []
    try:
        pieces = drawn(stages)
    except _NotADrawing as error:
        return [Problem(keys={"layout.stages": stages}, rule=error.rule, fix=error.fix)]
    symbols, keys = "".join(pieces), {"layout.stages": stages}
    found = []
    if symbols.count("E") != 1 or symbols[0] != "E":
        rule = "E, the embedding, must be there once, before all else"
        found.append(
            Problem(keys=keys, rule=rule, fix=f"start with E{'' if 'E' not in symbols else ', and only there'}")
        )
    if symbols.count("L") != 1 or symbols[-1] != "L":
        rule = "L, the loss, must be there once, after all else"
        found.append(Problem(keys=keys, rule=rule, fix=f"end with L{'' if 'L' not in symbols else ', and only there'}"))
    if (num_drawn := symbols.count("t")) != layers:
        found.append(
            Problem(
                keys={**keys, "model.layers": layers},
                rule=f"it draws {_count(num_drawn, 'layer')}, and the model has {layers}",
                fix=f"write t {_count(layers, 'time')}" + (f", or use model.layers={num_drawn}" if num_drawn else ""),
            )
        )
    if len(pieces) != pp * chunks:
        virtual = {"layout.virtual_stages": chunks} if chunks > 1 else {}
        wanted = f"pp x virtual_stages = {pp * chunks}" if virtual else f"pp = {pp}"
        found.append(
            Problem(
                keys={**keys, "layout.pp": pp, **virtual},
                rule=f"it draws {_count(len(pieces), 'stage')}, and there are {wanted}",
                fix=f"write | {_count(pp * chunks - 1, 'time')}"
                + (f", or use pp {len(pieces) // chunks}" if len(pieces) % chunks == 0 else ""),
            )
        )
    return found


def drawn(stages: str) -> list[str]:
    """The symbols of every stage of a drawing, repetitions written out.

    >>> drawn("Et|(tt|)*2,L")
    ['Et', 'tt', 'tt', 'L']
    """
    pieces = _written_out(stages).split("|")
    if pieces == [""]:
        raise _NotADrawing("it draws nothing", "write auto, or leave it out")
    for number, piece in enumerate(pieces, 1):
        if not piece:
            raise _NotADrawing(f"stage {number} of {len(pieces)} is empty", "give it a block, or take one | away")
    return pieces


class _NotADrawing(Exception):
    """Text that does not draw stages: the rule it breaks, and a way out."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule, fix)
        self.rule, self.fix = rule, fix


def _written_out(text: str) -> str:
    """The drawing without parentheses, repetitions, commas and spaces."""
    open_at: list[int] = []
    levels = [""]
    last = ""  # what a * would repeat
    for token in re.finditer(r"\*[0-9]*|[^,\s]", text):
        symbol, at = token[0], f"at position {token.start() + 1}"
        match symbol[0]:
            case "E" | "t" | "L" | "|":
                last = symbol
                levels[-1] += last
            case "(":
                open_at.append(token.start() + 1)
                levels.append("")
                last = ""
            case ")":
                if not open_at:
                    raise _NotADrawing(f"the ) {at} closes nothing", "open it with (, or take it away")
                open_at.pop()
                last = levels.pop()
                levels[-1] += last
            case "*":
                if not last:
                    raise _NotADrawing(f"the * {at} has nothing before it to repeat", "write x*n or (..)*n")
                if not symbol[1:].strip("0"):
                    rule = f"the * {at} must be followed by how often, 1 or more"
                    raise _NotADrawing(rule, "write x*n or (..)*n with an n of at least 1")
                if len(symbol) > 7 or len(levels[-1]) + len(last) * int(symbol[1:]) > MAX_SYMBOLS:
                    raise _NotADrawing(f"the * {at} makes more than {MAX_SYMBOLS:,} blocks", "use a smaller n")
                levels[-1] += last * (int(symbol[1:]) - 1)
                last = ""
            case "m":
                rule = f"m {at} is multi-token prediction, which is not built so far"
                raise _NotADrawing(rule, "leave it out")
            case _:
                raise _NotADrawing(f"{symbol!r} {at} means nothing", LETTERS)
    if open_at:
        raise _NotADrawing(f"the ( at position {open_at[-1]} is not closed", "close it with )")
    return levels[0]


def _as_integers(costs: Sequence[float]) -> list[int]:
    """The costs in the largest unit of which all are exact multiples."""
    exact = [Fraction(cost) for cost in costs]
    assert min(exact) >= 0, f"a block has a negative cost: {costs}"
    unit = lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
