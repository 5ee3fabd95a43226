"""``rayformer ckpt``: look at checkpoints, verify and compare them, drop old ones, take weights in and out."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from rayformer.cell.plan import EXIT_FAILED, EXIT_FINISHED
from rayformer.ckpt import inspect
from rayformer.ckpt.hf import convert
from rayformer.ckpt.hf.weights import PREFIX, HFWeights
from rayformer.ckpt.manifest import Manifest, find_checkpoints, read_manifest
from rayformer.ckpt.storage import Folder, folder_at
from rayformer.ckpt.writer import prune
from rayformer.cli.columns import columns
from rayformer.errors import CheckpointError, ConfigError, Problem
from rayformer.shards import KINDS

app = typer.Typer(help="Look at checkpoints, verify them, compare two, drop old ones.", no_args_is_help=True)

Where = Annotated[str, typer.Argument(help="A checkpoint, a folder of them, or a run's folder: then the newest.")]
Several = Annotated[str, typer.Argument(help="A folder of checkpoints, or a run's.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def ls(where: Several, as_json: AsJson = False) -> None:
    """List checkpoints, the newest first."""
    rows = [_row(folder, read_manifest(folder)) for folder in find_checkpoints(_directory(where))]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _print(
        ("step", "samples", "saved from", "tensors", "size", "state hash", "folder"),
        (
            (
                row["step"],
                row["consumed_samples"],
                _layout(row["layout"]),
                row["tensors"],
                _size(row["bytes"]),
                row["state_hash"],
                row["folder"],
            )
            for row in rows
        ),
    )


@app.command()
def show(where: Where, as_json: AsJson = False) -> None:
    """Tell what a checkpoint is of, and every tensor with its shape and size."""
    folder = inspect.resolve_checkpoint(where)
    manifest = read_manifest(folder)
    row, tensors = _row(folder, manifest), list(_tensors(manifest))
    if as_json:
        values = {"virtual_ranks": manifest.virtual_ranks, "environment": dict(manifest.environment)}
        print(json.dumps(row | values | {"of_tensors": tensors}, indent=2))
        return
    told = {
        "run": manifest.job["run"]["name"],
        "step": row["step"],
        "consumed": f"{row['consumed_samples']} samples",
        "saved from": _layout(row["layout"]),
        "virtual ranks": manifest.virtual_ranks,
        "size": f"{_size(row['bytes'])} in {row['tensors']} tensors",
        "state hash": row["state_hash"],
    }
    print(folder)
    _print(("", ""), told.items())
    _print(
        ("tensor", "shape", "dtype", "shards", "size"),
        (
            (of["name"], " x ".join(map(str, of["shape"])), of["dtype"], of["shards"], _size(of["bytes"]))
            for of in tensors
        ),
    )


@app.command()
def verify(where: Where) -> None:
    """Read all of a checkpoint and compare every checksum, the coverage and the state hash; 0 or 1."""
    folder = inspect.resolve_checkpoint(where)
    manifest = read_manifest(folder)
    with _progress("verifying", inspect.num_bytes(manifest)) as on_bytes:
        problems = list(inspect.problems(folder, manifest, on_bytes=on_bytes))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(EXIT_FAILED)
    print(f"{folder}: whole, {_size(inspect.num_bytes(manifest))}, state hash {manifest.state_hash}")


@app.command("hash")
def hash_command(where: Where) -> None:
    """Compute the state hash from a checkpoint's files and print it."""
    folder = inspect.resolve_checkpoint(where)
    manifest = read_manifest(folder)
    with _progress("hashing", inspect.num_bytes(manifest)) as on_bytes:
        found = inspect.state_hash(folder, manifest, on_bytes=on_bytes)
    print(found)


@app.command()
def diff(first: Where, second: Where, as_json: AsJson = False) -> None:
    """Tell what two checkpoints don't share; 0 if they hold the same state and say the same of it, else 1."""
    found = list(inspect.differences(*map(inspect.resolve_checkpoint, (first, second))))
    if as_json:
        print(json.dumps([asdict(difference) for difference in found], indent=2))
    elif found:
        _print(("", "first", "second"), ((of.what, of.first, of.second) for of in found))
    else:
        print("the same")
    raise typer.Exit(EXIT_FAILED if found else EXIT_FINISHED)


@app.command("export")
def export_command(
    where: Where,
    target: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write, empty or new.")],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; the one that the run computed in unless told.")
    ] = None,
    max_shard_bytes: Annotated[
        int, typer.Option(metavar="N", help="How large a file may be, unless one tensor is larger.", min=1)
    ] = convert.MAX_SHARD_BYTES,
) -> None:
    """Write the weights of a checkpoint as transformers loads them: safetensors, config.json, the tokenizer's files."""
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise ConfigError(
            [Problem(keys={"--dtype": dtype}, rule="there is no such dtype", fix="use fp32, bf16 or fp16")]
        )
    folder, to = inspect.resolve_checkpoint(where), folder_at(target)
    if to.names():
        raise ConfigError([Problem(keys={"DIR": target}, rule="it is not empty", fix="name a folder that is")])
    manifest = read_manifest(folder)
    with _progress("exporting", inspect.num_bytes(manifest) // len(KINDS)) as on_bytes:
        total = convert.export(folder, manifest, to, dtype=dtype, max_shard_bytes=max_shard_bytes, on_bytes=on_bytes)
    print(f"{to}: {_size(total)} of weights of step {manifest.step}")


@app.command("import")
def import_command(
    source: Annotated[str, typer.Argument(metavar="HF", help="The folder of a Hugging Face model.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write the checkpoint of step 0 into.")],
) -> None:
    """Write Hugging Face weights as a checkpoint to start from, and print the model section that belongs to them."""
    weights = HFWeights(source.removeprefix(PREFIX))
    to = folder_at(directory)
    if find_checkpoints(to):
        rule = "there are checkpoints in it"
        raise ConfigError([Problem(keys={"DIR": directory}, rule=rule, fix="name another folder")])
    with _progress("importing", 4 * sum(prod(shape) for shape in weights.shapes.values())) as on_bytes:
        folder = convert.import_weights(weights, to, on_bytes=on_bytes)
    section = weights.model.model_dump(by_alias=True, exclude_defaults=True)
    print(yaml.safe_dump({"model": section, "checkpoint": {"init_from": str(folder)}}, sort_keys=False), end="")


@app.command("prune")
def prune_command(
    where: Several,
    keep: Annotated[int, typer.Option(metavar="N", help="How many of the newest stay.", min=1)],
    keep_every: Annotated[int, typer.Option(metavar="N", help="Those of every so many steps stay too.", min=0)] = 0,
) -> None:
    """Drop all but the newest checkpoints."""
    directory = _directory(where)
    found = find_checkpoints(directory)
    prune(directory, keep=keep, keep_every=keep_every)
    left = find_checkpoints(directory)
    print(f"dropped {len(found) - len(left)} of {len(found)}; the newest is {left[0]}")


def _directory(where: str) -> Folder:
    path = folder_at(where)
    for folder in (path, path / "checkpoints"):
        if find_checkpoints(folder):
            return folder
    raise CheckpointError(f"{where}: there are no checkpoints; name a folder of them, or the folder of a run")


def _row(folder: Folder, manifest: Manifest) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "step": manifest.step,
        "consumed_samples": manifest.consumed_samples,
        "layout": dict(manifest.layout),
        "tensors": len(manifest.shapes()),
        "bytes": inspect.num_bytes(manifest),
        "state_hash": manifest.state_hash,
    }


def _tensors(manifest: Manifest) -> Iterator[dict[str, Any]]:
    shards = defaultdict(list)
    for shard in manifest.shards:
        shards[shard.tensor].append(shard)
    for name, pieces in sorted(shards.items()):
        yield {
            "name": name,
            "shape": list(pieces[0].shape),
            "dtype": pieces[0].dtype,
            "shards": len(pieces),
            "bytes": sum(piece.num_bytes for piece in pieces),
        }


def _layout(layout: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "one cell"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _print(head: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    print("\n".join(columns(head, rows)))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error, and nothing elsewhere."""
    console = Console(stderr=True)
    columns = (what, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda num: progress.update(task, advance=num)
