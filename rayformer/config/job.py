"""A whole job: the sections of a job file, and the values that depend on where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ModelWrapValidatorHandler, SerializeAsAny, WrapValidator

from rayformer.config.batch import BatchConfig
from rayformer.config.checkpoint import CheckpointConfig
from rayformer.config.cluster import ClusterConfig, ObserveConfig
from rayformer.config.data import DataConfig, EvalConfig
from rayformer.config.faults import Faults
from rayformer.config.layout import LayoutConfig
from rayformer.config.model import CustomModelConfig, ModelConfig
from rayformer.config.optim import OptimConfig, PrecisionConfig
from rayformer.config.recompute import RecomputeConfig
from rayformer.config.recovery import RecoveryConfig
from rayformer.config.run import RunConfig
from rayformer.config.section import Section


class Schedule(Section):
    """The order in which a stage works through its microbatches."""

    name: str = Field("1f1b", description="Pipeline schedule: gpipe or 1f1b.")


def _built_in_or_own(value: Any, built_in: ModelWrapValidatorHandler[ModelConfig]) -> ModelConfig | CustomModelConfig:
    if isinstance(value, CustomModelConfig) or (isinstance(value, dict) and "factory" in value):
        return CustomModelConfig.model_validate(value)
    return built_in(value)


class Job(Section):
    """Everything a run is asked to do."""

    run: RunConfig
    model: Annotated[SerializeAsAny[ModelConfig], WrapValidator(_built_in_or_own)]
    layout: LayoutConfig = LayoutConfig()
    batch: BatchConfig
    schedule: Schedule = Schedule()
    optim: OptimConfig = OptimConfig()
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    faults: Faults = ()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()

    def dump(self) -> dict[str, Any]:
        """The job as plain values, as it is written to job.yaml and to manifests."""
        return self.model_dump(mode="json", by_alias=True)


def resolve(job: Job, *, dp: int, recorded: Mapping[str, int]) -> Job:
    """The job with every ``auto`` that decides numbers replaced.

    ``dp`` is the width the machine gives. ``recorded`` holds what the first run fixed, ``virtual_ranks`` and
    ``decay_steps``, and is empty at a first start. A dp beyond the virtual ranks becomes their number.
    """
    asked = job.batch.virtual_ranks
    virtual_ranks = recorded.get("virtual_ranks", dp) if asked == "auto" else asked
    asked_steps = job.optim.decay_steps
    decay_steps = recorded.get("decay_steps", job.run.steps) if asked_steps == "auto" else asked_steps
    return job.model_copy(
        update={
            "layout": job.layout.model_copy(update={"dp": dp}),
            "batch": job.batch.model_copy(update={"virtual_ranks": max(virtual_ranks, dp)}),
            "optim": job.optim.model_copy(update={"decay_steps": decay_steps}),
        }
    )
