"""What a worker is told: which cell it owns in which generation, and where to find everything."""

from __future__ import annotations

from dataclasses import dataclass

from rayformer.cell.plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One cell of one generation. The store's ``store_host:store_port`` is where the cells of it meet."""

    plan: RunPlan
    generation: int
    rank: int
    device: str
    store_host: str
    store_port: int
    loopback: bool
