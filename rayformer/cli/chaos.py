"""``rayformer chaos``: a job run twice, undisturbed and with the faults of a plan, and what the faults changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayformer.cell.origin import run_folder
from rayformer.cell.plan import EXIT_ABORTED, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from rayformer.cli.apart import CHECKS, setting, train_apart
from rayformer.cli.columns import columns
from rayformer.config.job import Job
from rayformer.config.load import load_job
from rayformer.config.strict_yaml import NotYaml, parse
from rayformer.errors import ConfigError, Problem, RunError
from rayformer.faults.outcome import COMPARED, Outcome, Proof, read_outcome
from rayformer.faults.plan import resolve_faults

MOST_DIFFERENCES = 10  # of those printed; the JSON has all


def chaos_command(job_file: Path, plan_file: Path, seed: int, sets: Sequence[str], json_file: Path | None) -> int:
    """Run, compare, print; 0 if every fault took place and changed no bit, else 1. ConfigError for a bad plan or job.

    Faults that make a gradient NaN change what is computed, so the undisturbed run has them too: then what is shown is
    that the other faults change nothing.
    """
    entries = _seeded(_read_plan(plan_file), seed)
    job = _with_faults(job_file, sets, entries)
    faults = resolve_faults(job.faults, job.layout.degrees)
    of_run = {"calm": [fault for fault in faults if fault.effect == "nan"], "chaos": faults}
    settings = {
        kind: [
            *sets,
            f"run.name={job.run.name}-{kind}",
            "checkpoint.dir=auto",
            "checkpoint.resume=auto",
            setting("faults", [fault.entry() for fault in these]),
        ]
        for kind, these in of_run.items()
    }
    jobs = {kind: load_job(job_file, these, CHECKS) for kind, these in settings.items()}
    statuses: dict[str, int] = {}
    stops = job.run.stop_at is not None and job.run.stop_at < job.run.steps
    for kind, these in of_run.items():
        print(f"{kind}: the run {jobs[kind].run.name} with {len(these)} faults", flush=True)
        statuses[kind] = train_apart(job_file, settings[kind], "--fresh")
        if statuses[kind] == EXIT_ABORTED or (statuses[kind] == EXIT_STOPPED and not stops):
            return statuses[kind]  # a signal, or a wait in vain
        if kind == "calm" and statuses[kind] != (EXIT_STOPPED if stops else EXIT_FINISHED):
            raise RunError(f"the undisturbed run ended with status {statuses[kind]}; see above, and mend the job first")
    outcome = read_outcome(faults, calm=run_folder(jobs["calm"]), chaos=run_folder(jobs["chaos"]))
    return tell(outcome, statuses, json_file)


def tell(outcome: Outcome, statuses: dict[str, int], json_file: Path | None) -> int:
    """Print the outcome, write it to ``json_file``, and judge it: the exit status."""
    print("\n".join(in_words(outcome)))
    errors = [
        str(
            Problem(
                keys={f"faults[{proof.fault.number}].{proof.fault.effect}": proof.fault.cell},
                rule=f"it did not take place at {proof.fault.at} of step {proof.fault.step}, so the run is void",
                fix="choose a step and a place that the cell comes by",
            )
        )
        for proof in outcome.proofs
        if not proof.is_proven
    ]
    if statuses["calm"] != statuses["chaos"]:
        errors.append(f"the run with the faults ended with status {statuses['chaos']}, and not {statuses['calm']}")
    if not outcome.is_equal:
        errors.append("the run with the faults has other bits than the undisturbed one")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(outcome, statuses) | {"errors": errors}, indent=2) + "\n")
    return EXIT_FAILED if errors else EXIT_FINISHED


def as_json(outcome: Outcome, statuses: dict[str, int]) -> dict[str, Any]:
    """Everything that is known of an outcome, as plain values."""
    keys = {difference.key for difference in outcome.differences}
    return {
        "runs": {
            kind: asdict(ran) | {"status": statuses[kind]}
            for kind, ran in (("calm", outcome.calm), ("chaos", outcome.chaos))
        },
        "incidents": [dict(incident) for incident in outcome.incidents],
        "faults": [
            asdict(proof.fault) | {"proven": proof.is_proven, "lines": [dict(line) for line in proof.lines]}
            for proof in outcome.proofs
        ],
        "goodput": outcome.chaos.goodput,
        "equal": {key: not keys & {key, "step"} for key in COMPARED} | {"state_hash": "state_hash" not in keys},
        "differences": [asdict(difference) for difference in outcome.differences],
        "void": outcome.is_void,
    }


def in_words(outcome: Outcome) -> Iterator[str]:
    """The lines of the table: faults, incidents, the two runs, and what differs."""
    yield "faults"
    yield from columns(
        ("", "effect", "cell", "step", "at", "took place"),
        (
            (proof.fault.number, proof.fault.effect, proof.fault.cell, proof.fault.step, proof.fault.at, _proven(proof))
            for proof in outcome.proofs
        ),
    )
    yield "incidents"
    keys = ("detect_s", "drain_s", "form_s", "restore_s", "first_step_s", "total_s")
    yield from columns(
        ("cells", "source", *(key.removesuffix("_s").replace("_", " ") for key in keys), "redone", "cause"),
        (
            (
                " ".join(incident["cells"] or ["none"]),
                incident["source"],
                *("?" if incident[key] is None else f"{incident[key]:.3f} s" for key in keys),
                incident["steps_redone"],
                str(incident["cause"]).partition("\n")[0],
            )
            for incident in outcome.incidents
        ),
    )
    yield "runs"
    yield from columns(
        ("", "steps", "executed", "goodput", "state hash"),
        (
            (kind, ran.steps, ran.executed, f"{ran.goodput:.1%} of {ran.wall_s:.1f} s", ran.state_hash or "none")
            for kind, ran in (("calm", outcome.calm), ("chaos", outcome.chaos))
        ),
    )
    for difference in outcome.differences[:MOST_DIFFERENCES]:
        where = "at the end" if difference.step is None else f"in step {difference.step}"
        yield f"{difference.key} {where}: {difference.calm} without faults, {difference.chaos} with them"
    if len(outcome.differences) > MOST_DIFFERENCES:
        yield f"and {len(outcome.differences) - MOST_DIFFERENCES} more differences"
    if outcome.is_equal:
        yield "equal: the final state, and every step's loss and grad_norm"


def _proven(proof: Proof) -> str:
    if not proof.lines:
        return "no"
    return ", ".join(f"step {line['step']} {line['at']}" for line in proof.lines)


def _read_plan(path: Path) -> list[Any]:
    def refuse(rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem(keys={"--plan": str(path)}, rule=rule, fix=fix)])

    try:
        entries, problems = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(f"it can't be read ({error.strerror})", "name a readable YAML file") from None
    except UnicodeDecodeError as error:
        raise refuse(f"byte {error.start} is not UTF-8 text", "save it as UTF-8") from None
    except NotYaml as error:
        raise refuse(str(error), "correct the YAML there") from None
    if problems:
        raise ConfigError(problems)
    if not isinstance(entries, list) or not entries:
        raise refuse("a plan is a list of faults", "write it like [{kill: pp1.dp0, step: 7, at: backward}]")
    return entries


def _seeded(entries: Sequence[Any], seed: int) -> list[Any]:
    return [{"seed": seed, **entry} if isinstance(entry, dict) else entry for entry in entries]


def _with_faults(job_file: Path, settings: Sequence[str], entries: Sequence[Any]) -> Job:
    return load_job(job_file, [*settings, setting("faults", list(entries))], CHECKS)
