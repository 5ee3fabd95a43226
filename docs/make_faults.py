"""Writes docs/guide/faults.md: how faults are asked for, with tables from the code that carries them out.

python docs/make_faults.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayformer.cell.progress import PHASES
from rayformer.config.faults import EFFECTS, Effect, FaultConfig
from rayformer.config.keys import keys_of
from rayformer.faults.plan import CONTROLLER_EFFECTS, NAMED_INSTRUCTIONS, PLACES, SECONDS

HEAD = """\
# Faults on purpose

Written by `python docs/make_faults.py` from `rayformer/config/faults.py` and `rayformer/faults/plan.py`; change the
tables there and the text here.

## A plan

A plan is a YAML list with an entry for each fault: one effect with its target, the step, and
where in the step. It is the section `faults` of a job, or a file of its own:

```yaml
- {kill: pp1.dp0, step: 7, at: backward}            # a cell: axes in any order, an omitted one is 0
- {freeze: any, step: [10, 20], at: any, seed: 3}   # drawn by the seed, the same every time
- {kill: pp0, step: 30, at: RecvGrad, microbatch: 2}
- {kill_holder: pp0, step: 40}
```

A fault happens once, after its mark was written where it outlives the process, so that whoever takes over does not
repeat it. With `times: 3` it happens again when the step is done again. `slow` and `nan` last: with `times: 3` they
happen in that step and the two after it. A place that is not part of every step, such as save, counts when it comes by
for the first time from the step on; joining, load, setup and idle lie before the step that begins next. Of two entries
for the same cell, step and place both happen: with `kill_holder` and `kill` it is lost together with its snapshots.
"""

CHAOS = """\
## What chaos prints

`rayformer chaos JOB --plan FILE --seed N --json FILE` trains the job twice, from the start and in folders of their own:
`<name>-calm` without the faults and `<name>-chaos` with them. (Faults that make a gradient NaN change what is computed,
so both have those.) `--seed` is for entries that have none. It prints every fault and where the journal says that it
took place; every incident with the seconds it took to detect, drain, form groups, restore and do the first step, and
the steps that were done again; for both runs the goodput, which is the time of their steps over all their time; and
whether the final state's hash and every step's loss and gradient norm are the same bits. The JSON file has all of it.

The exit status is 0 if every fault took place and no bit differs, and else 1: if a fault did not take place the run is
void, and an error names it. A bad plan or job is refused with status 2 before anything starts.
"""


def faults_page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_effects(), *_options(), *_places(), CHAOS])


def _effects() -> Iterator[str]:
    yield "## Effects\n"
    yield "| effect | target | what happens | options |"
    yield "| --- | --- | --- | --- |"
    fields = keys_of(FaultConfig)
    for effect in EFFECTS:
        yield f"| `{effect}` | {_target(effect)} | {fields[effect].description} | {', '.join(_allowed(effect))} |"
    yield ""


def _target(effect: Effect) -> str:
    return "a cell, for its node" if effect in CONTROLLER_EFFECTS else "a cell"


def _allowed(effect: Effect) -> Iterator[str]:
    yield "`step`"
    if effect not in CONTROLLER_EFFECTS:
        yield "`at`"
        yield "`microbatch`"
    if effect in SECONDS:
        yield "`seconds`"
    yield "`seed`"
    yield "`times`"


def _options() -> Iterator[str]:
    yield "## Options\n"
    yield "| option | default | meaning |"
    yield "| --- | --- | --- |"
    for key, field in keys_of(FaultConfig).items():
        if key not in EFFECTS:
            default = "required" if field.is_required() else "none" if field.default is None else field.default
            yield f"| `{key}` | {default} | {field.description} |"
    yield ""


def _places() -> Iterator[str]:
    yield "## Where: `at`\n"
    yield "| at | what begins there |"
    yield "| --- | --- |"
    for phase in PHASES:
        yield f"| `{phase}` | {PLACES[phase]} |"
    yield f"| {', '.join(f'`{name}`' for name in NAMED_INSTRUCTIONS)} | that instruction of the schedule |"
    yield "| `any` | a phase that the seed chooses: one of every step, for nan or a microbatch forward or backward |"
    yield ""


if __name__ == "__main__":
    (Path(__file__).parent / "guide" / "faults.md").write_text(faults_page(), encoding="utf-8")
