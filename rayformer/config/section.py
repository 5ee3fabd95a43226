"""What every section of a job file has in common: strict types, no unknown keys, never changed after it is made."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen, strict section of a job file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


Count: TypeAlias = Annotated[int, Field(ge=1)]
CountOrZero: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Auto: TypeAlias = Literal["auto"]
PathText: TypeAlias = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]*$")]
