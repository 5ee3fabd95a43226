"""Placement: which resources every cell asks for, and the groups that hold them.

One placement group per (pp, dp, cp): a single bundle with the resources of its tp cells, so that a tp group never spans
nodes and removing one group touches no other cell.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayformer.layout import Cell, Layout


@dataclass(frozen=True, kw_only=True)
class CellResources:
    """What one cell's actor asks for."""

    num_cpus: float
    num_gpus: int

    def bundle(self, num_cells: int) -> dict[str, float]:
        wanted = {"CPU": round(self.num_cpus * num_cells, 4), "GPU": float(self.num_gpus * num_cells)}
        return {name: amount for name, amount in wanted.items() if amount}


def cell_resources(device: str, world: int) -> CellResources:
    """One accelerator per cell; on CPUs a share small enough that all cells of the run fit on what there is."""
    if device == "cuda":
        return CellResources(num_cpus=0.5, num_gpus=1)
    cpus = ray.cluster_resources().get("CPU", 1.0)
    return CellResources(num_cpus=max(0.01, min(1.0, int(100 * cpus / world) / 100)), num_gpus=0)


class Placement:
    """The placement groups of a run."""

    def __init__(self, layout: Layout, resources: CellResources, run: str) -> None:
        self.resources = resources
        bundle = resources.bundle(layout.tp)
        self._bundle = bundle
        self._groups: dict[tuple[int, int, int], PlacementGroup] = {
            (cell.pp, cell.dp, cell.cp): placement_group([bundle], name=f"{run}/pp{cell.pp}.dp{cell.dp}.cp{cell.cp}")
            for cell in layout.cells()
            if cell.tp == 0
        }

    async def wait(self, seconds: float) -> str | None:
        """None when every bundle has its place; else, after ``seconds``, what is missing."""
        ready = [group.ready() for group in self._groups.values()]
        try:
            await asyncio.wait_for(asyncio.gather(*ready), timeout=seconds)
        except TimeoutError:
            placed, _ = ray.wait(ready, num_returns=len(ready), timeout=0)
            available = ray.available_resources()
            free = {name: available.get(name, 0.0) for name in self._bundle}
            return (
                f"{len(ready) - len(placed)} of {len(ready)} bundles of {self._bundle} found no node within"
                f" cluster.wait_s={seconds:g} s; free in the cluster: {free}; add nodes, or use a smaller layout"
            )
        return None

    def strategy(self, cell: Cell) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._groups[cell.pp, cell.dp, cell.cp], 0)

    def remove(self) -> None:
        for group in self._groups.values():
            remove_placement_group(group)
