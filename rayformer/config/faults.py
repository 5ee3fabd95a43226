"""Section ``faults``: what shall go wrong in a run, where and when, so that its recovery can be seen."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from rayformer.config.section import Count, CountOrZero, Positive, Section

Effect = Literal["kill", "exit", "raise", "freeze", "gil", "slow", "nan", "drop_node", "kill_standby", "kill_holder"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)


def _step_or_range(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        raise PydanticCustomError("step_or_range", "must be a step or a range of steps") from None


Steps: TypeAlias = Annotated[Count | Annotated[tuple[Count, Count], Field(strict=False)], WrapValidator(_step_or_range)]


class FaultConfig(Section):
    """One fault: one effect with its target, which is a cell such as pp1.dp0 or any, and when it happens."""

    model_config = ConfigDict(serialize_by_alias=True)

    kill: str | None = Field(None, description="The cell's process kills itself with SIGKILL.")
    exit: str | None = Field(None, description="The cell's process ends with status 1, without cleaning up.")
    raise_: str | None = Field(None, alias="raise", description="The cell's program raises a RuntimeError.")
    freeze: str | None = Field(None, description="The cell's process stops itself with SIGSTOP.")
    gil: str | None = Field(
        None, description="The cell's process holds Python's global lock for so many seconds, 600 unless told."
    )
    slow: str | None = Field(
        None, description="The cell sleeps there so many seconds, 1 unless told, in that step and the following ones."
    )
    nan: str | None = Field(
        None,
        description="A gradient of the cell becomes NaN, in that step and the following ones, which skip the update.",
    )
    drop_node: str | None = Field(None, description="The node that the cell is on is lost, with all that runs there.")
    kill_standby: str | None = Field(None, description="A standby on the cell's node is killed.")
    kill_holder: str | None = Field(
        None, description="The holder on the cell's node is killed, and with it the snapshots in its memory."
    )
    step: Steps = Field(description="The step it happens in; of a range, written [first, last], the seed chooses one.")
    at: str = Field(
        "forward", description="The phase or instruction it happens at the beginning of, or any for one by seed."
    )
    microbatch: CountOrZero | None = Field(None, description="The microbatch it happens at; null is the first to come.")
    seconds: Positive | None = Field(None, description="How long gil holds the lock, and slow sleeps.")
    seed: CountOrZero | None = Field(None, description="What any cell, any phase and a range of steps are drawn from.")
    times: Count = Field(
        1,
        description="How often it happens: in more steps for slow and nan, else each time that the step is done again.",
    )

    @model_serializer(mode="wrap")
    def _only_what_is_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


Faults: TypeAlias = Annotated[
    tuple[FaultConfig, ...],
    Field(
        strict=False,
        description="What shall go wrong, in order.",
        examples=["[{kill: pp1.dp0, step: 7, at: backward}]"],
    ),
]
