"""What shall go wrong in a run: the section ``faults`` of a job, checked, and made concrete by its seeds. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayformer.cell.progress import INSTRUCTIONS, PHASES, Phase
from rayformer.config.faults import EFFECTS, Effect, FaultConfig
from rayformer.config.job import Job
from rayformer.errors import ConfigError, Problem
from rayformer.layout import DENSE_AXES, Cell, Layout

ANY = "any"

# Where a fault can happen, and what is about to begin there.
PLACES: Mapping[Phase, str] = {
    "setup": "building the cell, before the first step",
    "load": "loading a state, before the first step or after a repair",
    "data": "reading the step's samples",
    "forward": "a forward pass, or sending or receiving its activations",
    "backward": "a backward pass, or sending or receiving its gradients",
    "reduce": "summing gradients over the replicas",
    "vote": "measuring the gradient and agreeing that all cells are alive",
    "update": "the optimizer's update",
    "gather": "collecting the updated parameters, or awaiting them",
    "snapshot": "copying the state out of the process",
    "eval": "an evaluation",
    "save": "writing a checkpoint",
    "idle": "waiting for the controller, between two generations or at the end",
    "joining": "forming groups of a new generation, in a cell that has lost another",
}
BETWEEN_STEPS: frozenset[Phase] = frozenset({"setup", "load", "idle", "joining"})
NOT_IN_EVERY_STEP: frozenset[Phase] = frozenset({*BETWEEN_STEPS, "snapshot", "eval", "save"})
NAMED_INSTRUCTIONS = tuple(filter(None, INSTRUCTIONS))
OF_MICROBATCHES = (
    "forward", "backward",
    "Forward", "Backward", "InputGrad", "WeightGrad", "SendAct", "RecvAct", "SendGrad", "RecvGrad",
)  # fmt: skip

CONTROLLER_EFFECTS: tuple[Effect, ...] = ("drop_node", "kill_standby")
LASTING_EFFECTS: tuple[Effect, ...] = ("slow", "nan")
SECONDS: Mapping[Effect, float] = {"gil": 600.0, "slow": 1.0}  # those that take some, and how many unless told
_DRAWN_PLACES = ("data", "forward", "backward", "reduce", "vote", "update", "gather", "snapshot")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault with nothing left open. ``number`` is its place in the plan, ``cell`` written in full."""

    number: int
    effect: Effect
    cell: str
    step: int
    at: str
    microbatch: int | None = None
    seconds: float | None = None
    times: int = 1

    def is_due(self, step: int) -> bool:
        """Whether what happens in ``step``, or between steps after it, is what the fault's step means.

        A lasting effect begins with its step. What is not part of every step counts when it comes for the first time
        from then on; between steps, that is before the fault's step or a later one begins.
        """
        if self.at in BETWEEN_STEPS:
            return step + 1 >= self.step
        if self.effect in CONTROLLER_EFFECTS or self.effect in LASTING_EFFECTS or self.at in NOT_IN_EVERY_STEP:
            return step >= self.step
        return step == self.step

    def entry(self) -> dict[str, Any]:
        """The fault as an entry of a job's ``faults``."""
        given = {"microbatch": self.microbatch, "seconds": self.seconds}
        fixed = {self.effect: self.cell, "step": self.step, "at": self.at, "times": self.times}
        return fixed | {key: value for key, value in given.items() if value is not None}


def resolve_faults(section: Sequence[FaultConfig], layout: Layout) -> tuple[Fault, ...]:
    """The faults that a job asks for, their cells, places and steps drawn where the job leaves that to a seed.

    Raises ConfigError for what does not exist in ``layout``.
    """
    sizes = {axis: layout.size(axis) for axis in DENSE_AXES}
    if problems := list(_problems(section, sizes)):
        raise ConfigError(problems)
    return tuple(_resolved(number, entry, layout) for number, entry in enumerate(section))


def fault_problems(job: Job) -> Iterator[Problem]:
    """What keeps a job's faults from taking place, as far as it can be seen before the machine is known."""
    sizes = {axis: getattr(job.layout, axis) for axis in DENSE_AXES}
    yield from _problems(job.faults, {axis: size for axis, size in sizes.items() if size != "auto"})
    for number, entry in enumerate(job.faults):
        key = f"faults[{number}]"
        if _last(entry) > job.run.steps:
            yield Problem(
                keys={f"{key}.step": _plain(entry.step), "run.steps": job.run.steps},
                rule="the run ends before that step",
                fix=f"use a step of at most {job.run.steps}",
            )
        if entry.microbatch is not None and entry.microbatch >= job.batch.num_microbatches:
            yield Problem(
                keys={f"{key}.microbatch": entry.microbatch},
                rule=f"a step has {job.batch.num_microbatches} microbatches, counted from 0 on each replica",
                fix="use a smaller one",
            )


def _problems(section: Sequence[FaultConfig], sizes: Mapping[str, int]) -> Iterator[Problem]:
    for number, entry in enumerate(section):
        yield from _entry_problems(f"faults[{number}]", entry, sizes)


def _entry_problems(key: str, entry: FaultConfig, sizes: Mapping[str, int]) -> Iterator[Problem]:
    targets = _targets(entry)
    if not targets:
        rule, fix = "it has no effect", f"give one of {', '.join(EFFECTS)} and its cell"
        yield Problem(keys={key: "{...}"}, rule=rule, fix=fix)
        return
    if len(targets) > 1:
        keys = {f"{key}.{effect}": target for effect, target in targets.items()}
        yield Problem(keys=keys, rule="a fault has one effect", fix="make an entry of each")
        return
    ((effect, target),) = targets.items()
    yield from _target_problems(f"{key}.{effect}", target, sizes)
    yield from _place_problems(key, entry, effect)
    if isinstance(entry.step, tuple) and entry.step[0] > entry.step[1]:
        rule, fix = "the first step comes after the last", f"write [{entry.step[1]}, {entry.step[0]}]"
        yield Problem(keys={f"{key}.step": _plain(entry.step)}, rule=rule, fix=fix)
    if entry.seconds is not None and effect not in SECONDS:
        rule, fix = f"{effect} takes no time; only {' and '.join(SECONDS)} do", "leave it out"
        yield Problem(keys={f"{key}.seconds": entry.seconds}, rule=rule, fix=fix)
    elif effect == "gil" and entry.seconds is not None and entry.seconds > _LONGEST_S:
        rule, fix = "the lock can't be held that long", f"use {_LONGEST_S} or less"
        yield Problem(keys={f"{key}.seconds": entry.seconds}, rule=rule, fix=fix)
    open_keys: dict[str, object] = {f"{key}.{effect}": target} if target == ANY else {}
    open_keys |= {f"{key}.at": ANY} if entry.at == ANY else {}
    open_keys |= {f"{key}.step": _plain(entry.step)} if isinstance(entry.step, tuple) else {}
    if open_keys and entry.seed is None:
        rule, fix = "what is drawn needs a seed, so that it can be drawn again", "add seed: 1"
        yield Problem(keys=open_keys, rule=rule, fix=fix)


_LONGEST_S = 4000  # in microseconds this fits into 32 bits


def _target_problems(key: str, target: str, sizes: Mapping[str, int]) -> Iterator[Problem]:
    if target == ANY:
        return
    try:
        cell = Cell.parse(target)
    except ValueError:
        rule, fix = "it is not a cell", "write it like pp1.dp0.tp1, each axis at most once, or any"
        yield Problem(keys={key: target}, rule=rule, fix=fix)
        return
    for axis, size in sizes.items():
        if getattr(cell, axis) >= size:
            rule = f"layout.{axis}={size} has no {axis}{getattr(cell, axis)}"
            there = f"{axis}0" if size == 1 else f"{axis}0 to {axis}{size - 1}"
            yield Problem(keys={key: target}, rule=rule, fix=f"use {there}")


def _place_problems(key: str, entry: FaultConfig, effect: Effect) -> Iterator[Problem]:
    at = entry.at
    if at not in (*PHASES, *NAMED_INSTRUCTIONS, ANY):
        rule = "there is no such phase or instruction"
        fix = f"use one of {', '.join((*PHASES, *NAMED_INSTRUCTIONS))}, or any"
        yield Problem(keys={f"{key}.at": at}, rule=rule, fix=fix)
        return
    if effect in CONTROLLER_EFFECTS:
        asked: dict[str, object] = {f"{key}.at": at} if at != "forward" else {}
        asked |= {f"{key}.microbatch": entry.microbatch} if entry.microbatch is not None else {}
        if asked:
            rule, fix = f"{effect} happens when the step is told of, wherever the cell is then", "leave it out"
            yield Problem(keys=asked, rule=rule, fix=fix)
        return
    if effect == "nan" and at not in (*OF_MICROBATCHES, ANY):
        rule, fix = "a gradient can only be spoiled while it is computed", "use forward or backward"
        yield Problem(keys={f"{key}.at": at}, rule=rule, fix=fix)
    elif entry.microbatch is not None and at not in (*OF_MICROBATCHES, ANY):
        keys = {f"{key}.microbatch": entry.microbatch, f"{key}.at": at}
        yield Problem(keys=keys, rule="nothing there belongs to a microbatch", fix="leave microbatch out")


def _resolved(number: int, entry: FaultConfig, layout: Layout) -> Fault:
    ((effect, target),) = _targets(entry).items()

    def draw(what: str, size: int) -> int:
        """One of ``size``, the same on every machine and in every version."""
        digest = hashlib.sha256(f"{entry.seed} {number} {what}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % size

    places = ("forward", "backward") if effect == "nan" or entry.microbatch is not None else _DRAWN_PLACES
    first, last = entry.step if isinstance(entry.step, tuple) else (entry.step, entry.step)
    return Fault(
        number=number,
        effect=effect,
        cell=str(layout.cell(draw("cell", layout.world)) if target == ANY else Cell.parse(target)),
        step=first + draw("step", last - first + 1),
        at=places[draw("at", len(places))] if entry.at == ANY else entry.at,
        microbatch=entry.microbatch,
        seconds=entry.seconds or SECONDS.get(effect),
        times=entry.times,
    )


def _targets(entry: FaultConfig) -> dict[Effect, str]:
    targets = {effect: getattr(entry, "raise_" if effect == "raise" else effect) for effect in EFFECTS}
    return {effect: target for effect, target in targets.items() if target is not None}


def _last(entry: FaultConfig) -> int:
    return max(entry.step) if isinstance(entry.step, tuple) else entry.step


def _plain(step: int | tuple[int, int]) -> int | list[int]:
    return list(step) if isinstance(step, tuple) else step
