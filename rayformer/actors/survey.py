"""What the holders of all nodes have of every cell, asked after a loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray.actor import ActorHandle

from rayformer.actors.crew import Crew
from rayformer.actors.watch import NO_ANSWER, answer
from rayformer.control.restore import Holdings

SURVEY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """``holdings`` of every cell, and by cell the ``second_holder`` that has what is said of one there."""

    holdings: dict[str, Holdings]
    second_holder: dict[str, ActorHandle]


async def survey(crew: Crew, cells: Iterable[str]) -> Found:
    """Ask every holder; one that does not answer has nothing.

    A cell's own slots are those on the node of its owner, whoever that is now; slots on another node are of a past
    owner, and as good as copies.
    """
    own: dict[str, tuple[int, ...]] = {}
    second: dict[str, tuple[int, ...]] = {}
    where: dict[str, ActorHandle] = {}

    def found_elsewhere(cell: str, steps: tuple[int, ...], holder: ActorHandle) -> None:
        if steps and max(steps) >= max(second.get(cell, (-1,))):
            second[cell], where[cell] = steps, holder

    for node, holder in list(crew.holders.items()):
        told = await answer(holder.survey.remote(), SURVEY_S)
        if told is NO_ANSWER:
            continue
        slots, copies = told
        for cell, steps in slots.items():
            if crew.owners[cell].node == node:
                own[cell] = steps
            else:
                found_elsewhere(cell, steps, holder)
        for cell, steps in copies.items():
            found_elsewhere(cell, steps, holder)
    holdings = {cell: Holdings(holder=own.get(cell, ()), second_holder=second.get(cell, ())) for cell in cells}
    return Found(holdings=holdings, second_holder=where)
