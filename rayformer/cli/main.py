"""``rayformer``: the commands. Heavy imports come only after the job was found good."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rayformer.cell.plan import EXIT_ABORTED, EXIT_BAD_JOB, EXIT_FAILED
from rayformer.cell.problems import job_problems
from rayformer.cell.report import report_run
from rayformer.cli import ckpt
from rayformer.config.job import Job
from rayformer.config.load import load_job
from rayformer.errors import ConfigError, DataError, Problem, RayformerError, RunError
from rayformer.faults.plan import fault_problems
from rayformer.observe.rundir import RunDir

app = typer.Typer(
    help="Pretrain transformers on a Ray cluster, and do not stop when GPUs do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.add_typer(ckpt.app, name="ckpt")


@app.callback()
def _commands() -> None:
    """Pretrain transformers on a Ray cluster, and do not stop when GPUs do."""


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="The job file, YAML.", metavar="JOB")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; what is there is set aside.")] = False,
    allow_change: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Let this key differ from the checkpoint's job.")
    ] = None,
) -> None:
    """Train: run JOB to its last step, or go on with it from its newest checkpoint."""
    checked = _settled(load_job(job, overrides or [], [partial(job_problems, fresh=fresh), fault_problems]))
    from rayformer.actors.launch import run_job

    raise typer.Exit(run_job(checked, fresh=fresh, allowed=allow_change or [], out=sys.stdout))


@app.command()
def preprocess(
    inputs: Annotated[list[Path], typer.Argument(help="Text files, and folders of them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Prefix of the .bin/.idx pair to write.")],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer: byte.")] = "byte",
    suffix: Annotated[
        list[str] | None, typer.Option(help="Only files with this suffix, such as .txt; may be repeated.")
    ] = None,
) -> None:
    """Turn text files into a .bin/.idx pair to train on; every file becomes one document."""
    from rayformer.data.preprocess import preprocess as run
    from rayformer.data.tokenizers import get_tokenizer

    try:
        done = run(inputs, output, get_tokenizer(tokenizer), suffixes=suffix)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; name a place that can be written to with -o") from None
    print(f"{done.num_documents:,} documents, {done.num_tokens:,} tokens: {done.prefix}.bin, {done.prefix}.idx")


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN_DIR")]) -> None:
    """Write report.html of a run anew, from what lies in its folder."""
    files = RunDir(run_dir)
    if not (files.metrics.is_file() or files.journal.is_file()):
        rule = f"it has no {files.metrics.name} and no {files.journal.name}"
        raise ConfigError([Problem(keys={"RUN_DIR": str(run_dir)}, rule=rule, fix="name the folder of a run")])
    try:
        print(report_run(files))
    except OSError as error:
        raise RunError(f"{error.filename}: {error.strerror}; the report needs a place that can be written to") from None


@app.command()
def replay(
    journal: Annotated[Path, typer.Argument(help="The journal.jsonl of a run.", metavar="JOURNAL")],
    attempt: Annotated[int | None, typer.Option(metavar="N", help="Which attempt; the last one unless told.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the story as JSON.")] = False,
) -> None:
    """Run the journal of a run through the machine again, and print the story of an attempt."""
    from rayformer.cli.replay import replay_command

    raise typer.Exit(replay_command(journal, attempt, as_json))


@app.command()
def chaos(
    job: Annotated[Path, typer.Argument(help="The job file, YAML.", metavar="JOB")],
    plan: Annotated[Path, typer.Option(metavar="FILE", help="The faults: a YAML list like the job's section faults.")],
    seed: Annotated[int, typer.Option(metavar="N", help="The seed of faults that have none.", min=0)] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result there too.")
    ] = None,
) -> None:
    """Train JOB twice, undisturbed and with the faults of a plan, and tell what that changed."""
    from rayformer.cli.chaos import chaos_command

    raise typer.Exit(chaos_command(job, plan, seed, overrides or [], json_file))


@app.command()
def rehearse(
    job: Annotated[Path, typer.Argument(help="The job file, YAML.", metavar="JOB")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result there too.")
    ] = None,
) -> None:
    """Try in about a minute, on JOB cut short, whether it survives a lost cell and a resume with other sizes."""
    from rayformer.cli.rehearse import rehearse_command

    raise typer.Exit(rehearse_command(job, overrides or [], json_file))


@app.command()
def schedule(
    names: Annotated[
        list[str] | None, typer.Argument(help="gpipe, 1f1b, interleaved, zb_h1, zbv.", metavar="NAME...")
    ] = None,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.", min=1)] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.", min=1)] = 8,
    virtual: Annotated[
        int | None, typer.Option(help="Chunks on each rank; what the schedule wants unless told.", min=1)
    ] = None,
    costs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="F=1,B=1,W=1",
            help="Time of a rank's forward, input gradient and weight gradient; or one for each stage.",
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A schedule written down, a line for each rank.")
    ] = None,
    vee: Annotated[bool, typer.Option(help="Stages of the table turn back at the last rank.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw them on a page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers and timelines as JSON.")] = False,
) -> None:
    """Draw pipeline schedules, and compare what a step with them costs."""
    from rayformer.cli.schedule import schedule_command

    status = schedule_command(
        names or [],
        pp=pp,
        microbatches=microbatches,
        virtual=virtual,
        costs=costs or ["F=1,B=1,W=1"],
        table=table,
        vee=vee,
        html=html,
        as_json=as_json,
    )
    raise typer.Exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        status = app(args=arguments, standalone_mode=False)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_JOB
    except RayformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_ABORTED
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a wrong command line
            error.show()
            return int(error.exit_code)
        raise
    return int(status or 0)


def _settled(job: Job) -> Job:
    """The job with what the environment decides.

    Inside of ``ray job submit`` a job whose address is local runs on the cluster that it was submitted to. A private
    Ray answers only to who has its token, unless the user says otherwise.
    """
    if job.cluster.address != "local":
        return job
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return job.model_copy(update={"cluster": job.cluster.model_copy(update={"address": "auto"})})
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    return job


def run() -> None:
    """The console command."""
    sys.exit(main())


if __name__ == "__main__":
    run()
