"""A run on Ray: the same bits as without Ray, the files that are promised, and what it shows on the way."""

import re
import threading
from pathlib import Path

import pytest
from rayjobs import curve_of, folder_of, hash_of, lines_of, write_job

from rayformer.actors.worker import _log_to
from rayformer.ckpt.manifest import find_checkpoints, read_manifest

CELLS = ["pp0.dp0.cp0.tp0", "pp0.dp1.cp0.tp0", "pp1.dp0.cp0.tp0", "pp1.dp1.cp0.tp0"]
LINE = {"attempt", "generation", "step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "consumed_samples"}
LINE |= {"step_s", "tokens_per_s", "skipped", "time", "flops_per_token", "phase_s"}


@pytest.mark.timeout(240)
def test_four_actors_four_processes_and_one_process_agree_to_the_bit(
    standing, train, start, documents, tmp_path, one_process
):
    on_ray = write_job(tmp_path, "four", corpus=documents, address=standing.address, steps=8, layout={"pp": 2, "dp": 2})
    driver = train(on_ray)
    assert driver.finish() == 0, driver.output
    torchrun = write_job(tmp_path, "torchrun", corpus=documents, steps=8, layout={"pp": 2, "dp": 2})
    arguments = ["--standalone", "--nproc-per-node=4", "-m", "rayformer.cell", torchrun]
    processes = start("torch.distributed.run", *arguments)
    assert processes.finish() == 0, processes.output

    assert curve_of(on_ray) == curve_of(torchrun) == curve_of(one_process)
    assert list(curve_of(on_ray)) == list(range(1, 9))
    assert hash_of(on_ray) == hash_of(torchrun) == hash_of(one_process)

    the_run_folder_holds_what_is_promised(on_ray)
    the_console_has_every_step_once(driver.output)


def the_run_folder_holds_what_is_promised(job):
    folder = folder_of(job)
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "job.yaml", "metrics.jsonl", "journal.jsonl", "report.html", "checkpoints", "logs"
    }  # fmt: skip
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"worker-{i:04d}.log" for i in range(4)]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000000008", "latest"}
    *lines, last = lines_of(job)
    assert all(set(line) == LINE for line in lines)
    assert set(last) == LINE | {"eval_loss", "state_hash"}

    (membership,) = lines_of(job, kind="membership")
    assert list(membership["cells"]) == CELLS and membership["generation"] == 1
    assert all(set(member) == {"worker", "pid", "node", "param_addr"} for member in membership["cells"].values())
    assert [member["worker"] for member in membership["cells"].values()] == [f"worker-{i:04d}" for i in range(4)]
    assert len({member["pid"] for member in membership["cells"].values()}) == 4

    for i, (cell, member) in enumerate(membership["cells"].items()):
        text = (folder / "logs" / f"worker-{i:04d}.log").read_text()
        assert f"worker-{i:04d} INFO is process {member['pid']}" in text
        assert f"worker-{i:04d} INFO owns {cell} in generation 1" in text


def the_console_has_every_step_once(output):
    assert re.findall(r"^step +(\d+)/8 ", output, re.MULTILINE) == [str(step) for step in range(1, 9)]
    assert all(output.count(f"{cell} is worker-{i:04d}, pid ") == 1 for i, cell in enumerate(CELLS))
    assert "finished: 8 of 8 steps" in output
    assert re.search(r"\n  report      \S+/report\.html\n$", output)


@pytest.mark.timeout(240)
def test_nine_actors_share_two_cpus_with_one_thread_each(standing, train, documents, tmp_path, one_process):
    job = write_job(tmp_path, "nine", corpus=documents, address=standing.address, steps=3, layout={"pp": 3, "dp": 3})
    driver = train(job)
    assert driver.finish() == 0, driver.output
    assert len(lines_of(job, kind="membership")[0]["cells"]) == 9
    (checkpoint,) = find_checkpoints(folder_of(job) / "checkpoints")
    assert read_manifest(checkpoint).environment["threads"] == 1
    # three replicas, of which one runs two of the four virtual ranks
    assert curve_of(job) == {step: line for step, line in curve_of(one_process).items() if step <= 3}


def test_an_exception_in_a_thread_of_a_worker_stands_in_its_file_under_its_name(tmp_path, monkeypatch):
    import logging

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    path = Path(tmp_path) / "logs" / "worker-0003.log"
    _log_to(path, "worker-0003")

    def load():
        raise ValueError("shard 7 is cut short")

    thread = threading.Thread(target=load, name="loader")
    thread.start()
    thread.join()
    text = path.read_text()
    assert re.search(r"worker-0003 ERROR thread <Thread\(loader.*failed", text)
    assert "ValueError: shard 7 is cut short" in text and "in load" in text
