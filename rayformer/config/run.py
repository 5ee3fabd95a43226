"""Section ``run``: which run this is and how far it goes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayformer.config.section import Count, CountOrZero, PathText, Section


class RunConfig(Section):
    """Name, place, seed and length of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        description="Names the run, its folder and its actors: letters, digits, dots, dashes and underscores."
    )
    dir: PathText = Field(
        "runs", description="Folder that holds the run's folder; relative to where the command is given."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        1234, description="Decides the initial weights and the order of the samples."
    )
    steps: Count = Field(description="Number of updates after which the run is finished.")
    stop_at: CountOrZero | None = Field(
        None, description="Write a checkpoint after this many updates and exit with status 75; 0 is the initial state."
    )
