"""Writes docs/guide/faults.md: how faults are asked for, with tables from the code that carries them out.

python docs/make_faults.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayformer.cell.progress import PHASES
from rayformer.config.faults import EFFECTS, Effect, FaultConfig
from rayformer.config.keys import keys_of
from rayformer.faults.cut import SAVED, STEPS, STRUCK
from rayformer.faults.plan import CONTROLLER_EFFECTS, NAMED_INSTRUCTIONS, PLACES, SECONDS
from rayformer.faults.rehearsed import ROUNDING

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

REHEARSAL = f"""\
## A rehearsal

`rayformer rehearse JOB` says in a minute or two whether a job would survive a lost cell and a resume, before it gets a
month of GPUs. It trains the job itself, cut: as few layers as leave every stage one, the smallest batch that fits the
layout, and the first {STEPS} steps of its learning rate. Layout, microbatch, sequence, formats, data, device, schedule,
recomputation and `recovery` stay, as they are what is rehearsed. (But a `snapshot_every` above {STRUCK - SAVED} becomes
{STRUCK - SAVED}, and a ramp-up a short one that grows in step {STRUCK}. A model of `model.factory` stays whole.)

Four runs follow each other, each in a process and in a folder of its own; the run's own folder is not touched:

1. `<name>-rehearsal-calm`: the job, undisturbed, with a checkpoint after step {SAVED}. It must run, and its losses must
   be numbers.
2. `<name>-rehearsal-struck`: a cell, not the first unless there is no other, is killed in backward of step {STRUCK}. It
   must be replaced, and every step and the final state have the same bits.
3. `<name>-rehearsal-micro`: a resume from that checkpoint with the largest part of `batch.micro`, or with 2 instead of
   1. Losses must be those of the undisturbed run to {ROUNDING["fp32"]:g}, relative, in fp32 and {ROUNDING["bf16"]:g} in
   bf16 and fp16, and gradient norms to ten times that, as the microbatch changes the order of additions.
4. `<name>-rehearsal-dp`: a resume with half of `layout.dp`, or with 2 instead of 1. It must have the same bits as far
   as the virtual ranks go, and else the same losses as above.

Without `precision.deterministic` no run needs to have the same bits, and all are held to rounding. A row for each run
tells what came of it, and of a repair its seconds, where the lost state was found, and whether a standby took over or
a process had to start: in so few steps a standby is hardly ready. A batch that can't be divided otherwise, or a second
replica for which there are no devices, is skipped, and the row says why. What a run prints is in `logs/driver.log` of
its folder; if it fails, the end of that is shown.

The last line is `this job survives: ...`, or there are `error: ...` lines with the remedy. The exit status is 0 if
everything that was tried held, 1 if not, 2 for a bad job, for which nothing is started, and that of a run which a
signal ended. `--json FILE` writes all of it. If all held, the checkpoints of these runs are removed. What only the
whole model shows a rehearsal can't tell: its memory, its speed, and what comes after the first {STEPS} steps.
"""


def faults_page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_effects(), *_options(), *_places(), CHAOS, REHEARSAL])


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
