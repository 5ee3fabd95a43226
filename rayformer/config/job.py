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
from rayformer.config.section import Count, Section


class Schedule(Section):
    """The order in which a pipeline rank works through its microbatches."""

    name: str = Field(
        "1f1b",
        description="Pipeline schedule: gpipe, 1f1b, interleaved (with layout.virtual_stages above 1), zb_h1, "
        "zbv (with layout.virtual_stages 2), or table.",
    )
    group: Count | None = Field(
        None,
        description="Microbatches that interleaved passes through a chunk at a time, pp or more; none takes the "
        "fewest that leave no short group.",
    )
    table: str = Field(
        "", description="The schedule table as text: a line for each rank, in the words of rayformer schedule."
    )
    vee: bool = Field(False, description="Whether the stages of a table turn back at the last rank, as those of zbv.")

    @property
    def options(self) -> dict[str, Any]:
        """What a schedule needs to know besides its name."""
        return {"group": self.group, "table": self.table, "vee": self.vee}


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
