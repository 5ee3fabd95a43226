"""Saving and loading 1 GB of state over two processes, beside torch.distributed.checkpoint on as much.

    python benchmarks/checkpoint.py [--rounds 7] [--size-mb 1074]

Both sides hold the same masters and moments of the same model, dp 2 with a sharded optimizer. In turn, in one run:

save      how long the training processes are held up, and until the checkpoint is complete and durable. Ours is the
          copy into the slots, and then a saver in a process of its own, as in a run; the peer is ``async_save`` by
          thread and by process, and ``save``. "plain" is one process that writes as many bytes to one file, and fsync.
load      into tp 2: ours fills the cells and recomputes the state hash; the peer's reshard load fills DTensors of the
          same pieces and verifies nothing. Everything is in the page cache. Bytes read are the kernel's count (rchar).

The figures are ratios of medians; the first round is left out. Writes benchmarks/results/checkpoint-DATE.json.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ours import open_cell
from sides import Side, open_sides, write_result
from workloads import Workload, job_tree, write_corpus

from rayformer.actors.holder import Place
from rayformer.actors.saver import Order, Saver
from rayformer.cell.snapshot import Snapshots, slot_bytes, slot_index
from rayformer.cell.state import load_checkpoint, make_manifest
from rayformer.ckpt.hash import shown
from rayformer.ckpt.manifest import step_folder
from rayformer.ckpt.share import plan_files, shapes_of
from rayformer.ckpt.slots import dump_index, load_index
from rayformer.ckpt.storage import folder_at
from rayformer.ckpt.writer import commit, start
from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.shards import KINDS

WORKLOAD = Workload(
    layers=7, hidden=1024, heads=16, kv_heads=16, ffn=2816, vocab=257, seq=16, global_batch=2, micro=1,
)  # fmt: skip
KINDS_OF_PEER = ("thread", "process")
PAGE = 16 * 2**20
WARM = 3  # steps before the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        corpus = write_corpus(root / "corpus", WORKLOAD.vocab)
        trees = {"dp": job_tree(WORKLOAD, corpus, dp=2), "tp": job_tree(WORKLOAD, corpus, tp=2)}
        entries = [
            ("cells", our_cells, trees["dp"], 2),
            ("saver", our_saver, trees["dp"], 1),
            ("target", our_target, trees["tp"], 2),
            ("dcp", peer, trees["dp"], 2),
            ("plain", plain, None, 1),
        ]
        with open_sides(entries) as sides:
            by_name = {side.name: side for side in sides}
            rounds = [one_round(by_name, root, number) for number in range(options.rounds + 1)]
    rows = {key: [r[key] for r in rounds[1:]] for key in rounds[0]}
    medians = {key: statistics.median(values) for key, values in rows.items()}
    blocked = min(medians[f"blocked dcp {kind}"] for kind in KINDS_OF_PEER)
    figures = {
        "blocked": (medians["blocked ours"] / blocked, 0.4),
        "blocked beyond the step's snapshot": (medians["blocked ours, snapshot taken"] / blocked, 0.4),
        "write throughput": (medians["total plain"] / medians["total ours"], 0.8),
        "load": (medians["load ours"] / medians["load dcp"], 0.8),
        "bytes read": (medians["bytes read ours"] / medians["bytes needed"], 1.05),
    }
    for key, value in medians.items():
        print(
            f"{key:32} {value:14.3f}   {' '.join(f'{v:.3f}' for v in rows[key])}"
            if value < 1e5
            else f"{key:32} {value:.0f}"
        )
    for key, (ratio, bar) in figures.items():
        print(f"{key:40} {ratio:.3f}  (bar {bar})")
    write_result(
        "checkpoint",
        {
            "figures": {key: {"ratio": ratio, "bar": bar} for key, (ratio, bar) in figures.items()},
            "medians": medians,
            "rounds": rows,
            "settings": {"workload": vars(WORKLOAD), "torch": torch.__version__, "rounds": options.rounds},
        },
    )


def one_round(sides: dict[str, Side], root: Path, number: int) -> dict[str, float]:
    """Everything once, the kinds of saving in another order each time."""
    step = number + 1
    found: dict[str, float] = {}
    saves: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("ours", lambda: save_ours(sides, root / "ours", step)),
        ("thread", lambda: save_peer(sides["dcp"], root / f"thread-{step}", "thread")),
        ("process", lambda: save_peer(sides["dcp"], root / f"process-{step}", "process")),
        ("sync", lambda: save_peer(sides["dcp"], root / f"sync-{step}", "sync")),
        ("plain", lambda: {"total plain": sides["plain"].ask(str(root / "plain"))[0]}),
    ]
    for _, save in saves[number % 5 :] + saves[: number % 5]:
        os.sync()
        found |= save()
    loads = [
        lambda: load_ours(sides["target"], root / "ours", WARM + step),
        lambda: load_peer(sides["dcp"], root / f"sync-{step}"),
    ]
    for load in loads if number % 2 else reversed(loads):
        found |= load()
    for path in root.glob("*-*"):
        if path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(root / "ours" / step_folder(WARM + step))
    return found


def save_ours(sides: dict[str, Side], folder: Path, step: int) -> dict[str, float]:
    """The cells pin the state of a step, one of them having taken its snapshot or not, and the saver writes it."""
    began = time.perf_counter()
    cells = sides["cells"].ask(step)
    sides["saver"].ask((folder, WARM + step, {cell["name"]: (cell["pid"], cell["descriptor"]) for cell in cells}))
    total = time.perf_counter() - began
    return {
        "blocked ours": max(cell["blocked_s"] for cell in cells),
        "blocked ours, snapshot taken": max(cell["pin_s"] for cell in cells),
        "total ours": total - min(cell["pin_s"] for cell in cells),
    }


def save_peer(side: Side, folder: Path, kind: str) -> dict[str, float]:
    answers = side.ask(("save", str(folder), kind))
    return {
        f"blocked dcp {kind}": max(answer["blocked_s"] for answer in answers),
        f"total dcp {kind}": max(answer["total_s"] for answer in answers),
    }


def load_ours(side: Side, folder: Path, step: int) -> dict[str, float]:
    answers = side.ask(folder / step_folder(step))
    return {
        "load ours": max(answer["seconds"] for answer in answers),
        "bytes read ours": sum(answer["read"] for answer in answers),
        "bytes needed": sum(answer["needed"] for answer in answers),
    }


def load_peer(side: Side, folder: Path) -> dict[str, float]:
    answers = side.ask(("load", str(folder), ""))
    return {
        "load dcp": max(answer["seconds"] for answer in answers),
        "bytes read dcp": sum(answer["read"] for answer in answers),
    }


def our_cells(tree: dict[str, Any], rank: int, world: int, store: dist.Store) -> Callable[[int], Any]:
    """A training process with its slots, which stand in for its holder's."""
    cell = open_cell(tree, rank, world, store)
    num_bytes = slot_bytes(cell, is_copied=False)
    descriptor = os.memfd_create("slots")
    os.ftruncate(descriptor, num_bytes)
    snapshots = Snapshots(cell, mmap.mmap(descriptor, num_bytes), every=1)
    for warm in range(WARM):  # all slots were written before
        cell.position.move_to(warm, consumed_samples=0)
        snapshots.take()

    def save(step: int) -> dict[str, Any]:
        snapshots.file.unpin()
        for flat in cell.optimizer.flat_state():  # as the update before does, after this process had stood still
            flat.mul_(1.0)
        cell.position.move_to(WARM + step, consumed_samples=2 * step)
        cell.groups.world.barrier()
        began = time.perf_counter()
        snapshots.pin(lambda: False)
        blocked_s = time.perf_counter() - began
        began = time.perf_counter()
        snapshots.pin(lambda: False)
        return {
            "name": str(cell.groups.cell),
            "pid": os.getpid(),
            "descriptor": descriptor,
            "blocked_s": blocked_s,
            "pin_s": time.perf_counter() - began,
            "index": len(dump_index(slot_index(cell))),
        }

    return save


def our_saver(tree: dict[str, Any], rank: int, world: int, store: dist.Store) -> Callable[[Any], Any]:
    """What the controller and the saver of a node do, in one process."""
    job = resolve(job_from_tree(tree), dp=2, recorded={})
    saver = Saver()

    def save(request: tuple[Path, int, dict[str, tuple[int, int]]]) -> None:
        directory, step, cells = folder_at(request[0]), request[1], request[2]
        folder = directory / step_folder(step)
        start(folder)
        places = {cell: Place(pid=pid, descriptor=descriptor) for cell, (pid, descriptor) in cells.items()}
        held = {cell: load_index(text) for cell, text in saver.indexes(places).items()}
        files = plan_files(held, max_file_bytes=job.checkpoint.max_file_bytes)
        order = Order(
            number=step, folder=folder, step=step, places=places, files=files, shapes=shapes_of(held.values())
        )
        share = saver.write(order)
        manifest = make_manifest(
            job, step=step, extra=share.extra, records=list(share.records), state_hash=shown(share.hash)
        )
        commit(directory, folder, manifest)

    return save


def our_target(tree: dict[str, Any], rank: int, world: int, store: dist.Store) -> Callable[[Path], Any]:
    cell = open_cell(tree, rank, world, store)

    def load(folder: Path) -> dict[str, float]:
        cell.groups.world.barrier()
        before, began = _rchar(), time.perf_counter()
        load_checkpoint(cell, folder)
        seconds = time.perf_counter() - began
        manifest_bytes = (folder / "manifest.json").stat().st_size
        needed = sum(4 * shard.value.numel() for shard in cell.optimizer.owned_state())
        return {"seconds": seconds, "read": _rchar() - before - manifest_bytes, "needed": needed}

    return load


def peer(tree: dict[str, Any], rank: int, world: int, store: dist.Store) -> Callable[[Any], Any]:
    """The same tensors as DTensors: saved in shards of rows, as FSDP has them, and loaded as tp has them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    multiprocessing.current_process()._config["daemon"] = False  # async_save by process starts one
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_port(store, rank)))
    dist.init_process_group("gloo", store=dist.PrefixStore("dcp", store), rank=rank, world_size=world)
    cell_tree = {**tree, "layout": {"dp": 1}, "batch": {**tree["batch"], "virtual_ranks": 1}}
    specs = open_cell(cell_tree, 0, 1, store).specs
    mesh = init_device_mesh("cpu", (2,))

    def tensors(placement_of: Callable[[Any], Any]) -> dict[str, Any]:
        state = {}
        for name, spec in specs.items():
            for kind in KINDS:
                place = placement_of(spec)
                shape = list(spec.shape)
                if isinstance(place, Shard):
                    shape[place.dim] //= 2
                state[f"{name}@{kind}"] = DTensor.from_local(torch.ones(shape), mesh, [place], run_check=False)
        return state

    def rows(spec: Any) -> Any:
        return Shard(0) if spec.shape[0] % 2 == 0 else Replicate()

    def parallel(spec: Any) -> Any:
        if spec.split is None or spec.shape[spec.split.dim] % 2:
            return Replicate()
        return Shard(spec.split.dim)

    saved, loaded = tensors(rows), tensors(parallel)
    kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}

    def answer(request: tuple[str, str, str]) -> dict[str, float]:
        what, folder, kind = request
        for tensor in saved.values():
            tensor.to_local().mul_(1.0)
        dist.barrier()
        before, began = _rchar(), time.perf_counter()
        if what == "load":
            dcp.load(loaded, checkpoint_id=folder)
            return {"seconds": time.perf_counter() - began, "read": _rchar() - before}
        if kind == "sync":
            dcp.save(saved, checkpoint_id=folder)
            blocked_s = time.perf_counter() - began
        else:
            future = dcp.async_save(saved, checkpoint_id=folder, async_checkpointer_type=kinds[kind])
            blocked_s = time.perf_counter() - began
            (future if hasattr(future, "result") else future.upload_completion).result()
        return {"blocked_s": blocked_s, "total_s": time.perf_counter() - began}

    return answer


def plain(_: None, rank: int, world: int, store: dist.Store) -> Callable[[str], float]:
    """One process, one file, as many bytes, fsync."""
    data = memoryview(torch.rand(PAGE // 4).numpy()).cast("B")
    num_bytes = 12 * WORKLOAD_PARAMETERS

    def write(path: str) -> float:
        began = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        left = num_bytes
        while left:
            left -= os.write(descriptor, data[: min(left, PAGE)])
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - began
        os.unlink(path)
        return seconds

    return write


def _parameters(w: Workload) -> int:
    layer = 4 * w.hidden * w.hidden + 3 * w.hidden * w.ffn + 2 * w.hidden
    return w.layers * layer + 2 * w.vocab * w.hidden + w.hidden


WORKLOAD_PARAMETERS = _parameters(WORKLOAD)


def _rchar() -> int:
    """Bytes that this process has read by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


def _port(store: dist.Store, rank: int) -> int:
    """A port that both ranks know."""
    import socket

    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store.set("port", str(listener.getsockname()[1]))
    return int(store.get("port"))


if __name__ == "__main__":
    main()
