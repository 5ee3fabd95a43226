"""A peer of repair.py: the loop of restarted.py under Ray Train's TorchTrainer, on a Ray of its own."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    report,
)
from ray.train.torch import TorchConfig, TorchTrainer
from restarted import State, train
from workloads import REPAIRED


def main() -> None:
    folder = Path(sys.argv[1])
    world = REPAIRED.num_microbatches
    ray.init(
        num_cpus=world,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _system_config={"worker_niceness": 0},
    )
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(
            name="restarted",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def loop(config: dict[str, Any]) -> None:
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    checkpoint, found = get_checkpoint(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as there:
            found = torch.load(Path(there) / "state.pt")

    def save(state: State) -> None:
        values = {"step": state["step"]}
        if rank > 0:
            report(values)
            return
        with tempfile.TemporaryDirectory() as there:
            torch.save(state, Path(there) / "state.pt")
            report(values, checkpoint=Checkpoint.from_directory(there))

    train(Path(config["folder"]), rank, world, found, save)


if __name__ == "__main__":
    main()
