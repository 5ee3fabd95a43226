"""Placement: which resources every cell asks for, and the groups that hold them.

One placement group per (pp, dp, cp): a single bundle with the resources of its tp cells, so that a tp group never spans
nodes and removing one group touches no other cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayformer.layout import Cell, Layout

BundleKey = tuple[int, int, int]  # pp, dp, cp


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
    """The placement groups of a run, and spare ones that hold room for what may be lost."""

    def __init__(self, layout: Layout, resources: CellResources, run: str, *, num_spares: int = 0) -> None:
        self._bundle = resources.bundle(layout.tp)
        self._run = run
        self._groups: dict[BundleKey, PlacementGroup] = {}
        for cell in layout.cells():
            if cell.tp == 0:
                self._groups[cell.pp, cell.dp, cell.cp] = self._group(f"pp{cell.pp}.dp{cell.dp}.cp{cell.cp}")
        self._spares = [self._group(f"spare-{n}") for n in range(num_spares)]

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

    def move(self, bundle: BundleKey, live: Collection[str]) -> None:
        """Another place for a bundle whose node is lost: a spare's on one of the ``live`` nodes, or whatever is free.

        A group that waits for a lost node keeps Ray busy, so it is removed at once.
        """
        remove_placement_group(self._groups[bundle])
        for spare in self._spares:
            if _node_of(spare) in live:
                self._spares.remove(spare)
                self._groups[bundle] = spare
                return
        self._groups[bundle] = self._group("pp{}.dp{}.cp{}".format(*bundle))

    def remove(self) -> None:
        for group in (*self._groups.values(), *self._spares):
            remove_placement_group(group)

    def _group(self, name: str) -> PlacementGroup:
        return placement_group([self._bundle], name=f"{self._run}/{name}")


def _node_of(group: PlacementGroup) -> str:
    """The node of a group's only bundle, "" while it has none."""
    return str(placement_group_table(group)["bundles_to_node_id"][0])
