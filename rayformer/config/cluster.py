"""Sections ``cluster`` and ``observe``: which Ray is used, and what is shown."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayformer.config.section import PathText, Positive, Section


class ClusterConfig(Section):
    """The Ray cluster."""

    address: PathText = Field(
        "local", description="local starts a private Ray; auto joins the one this job runs on; else host:port."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="What cells compute on; auto is cuda where the cluster has accelerators."
    )
    wait_s: Positive = Field(600.0, description="Seconds to wait for actors to be placed before giving up.")
    dashboard: bool = Field(True, description="Whether the private Ray starts its dashboard.")


class ObserveConfig(Section):
    """What is shown and recorded."""

    progress: Literal["auto", "live", "plain", "none"] = Field(
        "auto", description="live draws a table, plain prints lines, auto takes live where there is a terminal."
    )
    trace: bool = Field(
        False,
        description="Whether every instruction of every cell is written to trace.json, for Perfetto; costs an exchange "
        "in each step.",
    )
