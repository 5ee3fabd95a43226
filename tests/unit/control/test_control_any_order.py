"""The machine in a small world of nodes, processes and snapshots, in which anything may fail at any time."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.control.failure import first_cause
from rayformer.control.machine import Machine
from rayformer.control.messages import (
    Abort,
    AskStop,
    CellBroke,
    CellDrained,
    CellEnded,
    CellFailed,
    CellLost,
    CellPlaced,
    CellReady,
    CellStalled,
    ControllerFailed,
    DeadlinePassed,
    Grant,
    HeldSaved,
    Join,
    Kill,
    NoRoom,
    Placed,
    PlacementFailed,
    Replace,
    SaveHeld,
    SetUp,
    StopAsked,
    Survey,
    Surveyed,
    Wait,
    WaitOver,
)
from rayformer.control.policy import Budget
from rayformer.control.restore import Held, Holdings, Restore
from rayformer.control.states import END_STATES, Finished, Member, Starting
from rayformer.events import CellDone, CellError

CELLS = ("pp0", "pp1", "pp2")
HOME = {"pp0": 0, "pp1": 1, "pp2": 1}  # the node where each cell begins
STEPS = 5
FAULTS = ("process", "process", "node", "freeze", "raise", "raise", "final", "cut", "room", "stop", "controller")


@dataclass(eq=False, kw_only=True)
class Owner:
    """The process of a cell: its node, the steps it has finished, and after which its state is whole."""

    node: int
    position: int = 0
    standing: int | None = None
    is_alive: bool = True
    is_frozen: bool = False
    kind: str = "died"  # how it died


@dataclass(frozen=True, kw_only=True)
class Due:
    """Something that will happen: ``what``, to whom, in answer to a command of which generation."""

    what: str
    g: int
    cell: str = ""
    detail: object = None


class World:
    """Obeys the commands, and lets happen what is due to them, with ``draw`` where several things may come of it.

    A process leaves its slots with the last three steps on its node, and copies on the next one; a node takes both.
    """

    def __init__(self, draw, *, max_failures, spares):
        self.draw, self.spares = draw, spares
        self.nodes = {0, 1}
        self.owners = {cell: Owner(node=node) for cell, node in HOME.items()}
        self.slots = {cell: (HOME[cell], ()) for cell in CELLS}
        self.copies = {cell: (1 - HOME[cell], ()) for cell in CELLS}
        self.checkpoint, self.until, self.committed = 0, STEPS, 0
        self.due = [Due(what="place", g=1)]
        self.to_replace = set()  # lost cells that the machine knows of
        self.untold = set()  # nodes that went without news after what is held was told
        self.generation = 1
        self.has_lost_a_node = self.is_stop_told = self.has_given_up = False
        self.max_failures, self.told = max_failures, []

    # What the machine commands.

    def obey(self, commands):
        for command in commands:
            assert command.generation >= self.generation or isinstance(command, Abort | Kill)
            assert set(getattr(command, "cells", ())) <= set(CELLS)
            self.generation = max(self.generation, command.generation)
            self.carry_out(command, command.generation)
        if any(isinstance(command, Grant) for command in commands):
            assert self.is_stop_told == any(isinstance(command, AskStop) for command in commands)

    def carry_out(self, command, g):
        match command:
            case SetUp():
                start = Restore(step=0, sources=dict.fromkeys(CELLS, "checkpoint"))
                self.due += [Due(what="join", g=g, cell=cell, detail=start) for cell in self.alive()]
            case Grant():
                self.due += [Due(what="run", g=g, cell=cell) for cell in self.alive()]
            case AskStop():
                self.until = min(self.until, max(owner.position for owner in self.owners.values()) + 1)
            case Abort(cells=cells):
                self.due += [Due(what="stand", g=g, cell=cell) for cell in cells if self.owners[cell].is_alive]
                self.due.append(Due(what="deadline", g=g))
            case Kill(cells=cells):
                for cell in cells:
                    self.to_replace.add(cell)
                    self.die(cell, "died")
            case Replace(cells=cells):
                assert cells and set(cells) <= self.to_replace and self.max_failures != 0
                assert not any(due.what == "replace" and due.cell in cells for due in self.due), "looked for twice"
                self.due += [Due(what="replace", g=g, cell=cell) for cell in cells]
            case Survey(number=number):
                self.due.append(Due(what="survey", g=g, detail=number))
            case Join(restore=restore, lost=lost):
                self.check(restore, lost)
                self.until = STEPS
                self.due += [Due(what="join", g=g, cell=cell, detail=restore) for cell in self.alive()]
            case Wait():
                self.due = [due for due in self.due if due.what != "wait"]
                self.due.append(Due(what="wait", g=g))
            case SaveHeld(restore=restore):
                self.due.append(Due(what="save", g=g, detail=restore))

    def check(self, restore, lost):
        """A Join asks only for what is there, of owners that are there, and no more than it must."""
        assert set(restore.sources) == set(CELLS) and not self.to_replace
        for cell, source in restore.sources.items():
            is_untold = bool(self.untold & {self.slots[cell][0], self.copies[cell][0]})
            assert is_untold or self.has(cell, restore), f"{source} of {cell} has no step {restore.step}"
            owner = self.owners[cell]
            if owner.standing == restore.step and cell not in lost and restore.source != "checkpoint":
                assert source == "live" or not owner.is_alive
        if not self.has_lost_a_node:
            assert restore.step >= self.committed, "a committed step is redone"

    def has(self, cell, restore):
        owner = self.owners[cell]
        match restore.sources[cell]:
            case "live":
                return owner.standing == restore.step  # or its death was not told yet
            case "holder":
                return restore.step in self.there(self.slots[cell])
            case "second_holder":
                return restore.step in self.there(self.copies[cell])
        return restore.step == self.checkpoint

    def there(self, place):
        node, steps = place
        return steps if node in self.nodes else ()

    def alive(self):
        return [cell for cell in CELLS if self.owners[cell].is_alive]

    # What happens in answer.

    def may_happen(self, due):
        if due.what == "replace":
            return self.room_for(due.cell) is not None or due.detail is None
        if not due.cell or due.what in ("tether", "watch"):
            return True
        owner = self.owners[due.cell]
        if due.what == "run" and owner.position < self.until:
            behind = min(other.position for other in self.owners.values())
            return not owner.is_frozen and (owner.position == behind or self.has_lost_a_peer(due.cell))
        return not owner.is_frozen

    def has_lost_a_peer(self, cell):
        return any(not owner.is_alive for other, owner in self.owners.items() if other != cell)

    def let_happen(self, due):
        """The events that the machine hears of it, in their order."""
        self.due.remove(due)
        g, cell, owner = due.g, due.cell, self.owners.get(due.cell)
        match due.what:
            case "place":
                if self.draw(st.integers(0, 9)) == 0:
                    return [PlacementFailed(generation=g, missing="a node")]
                return [Placed(generation=g)]
            case "join":
                return self.joins(due, owner)
            case "run":
                return self.runs(due, owner)
            case "stand":
                return self.stands(due, owner)
            case "deadline":
                return [DeadlinePassed(generation=g)]
            case "tether":  # of no generation, so that it may have been told in an earlier one
                self.to_replace.add(cell)
                if owner.kind == "node":
                    self.untold.discard(owner.node)
                told = max(1, self.generation - self.draw(st.integers(0, 1)))
                return [CellLost(generation=told, error=self.error(cell, owner.kind))]
            case "watch":
                return [CellStalled(generation=g, error=self.error(cell, "silent"))] if owner.is_frozen else []
            case "replace":
                return self.replaces(due)
            case "survey":
                self.untold.clear()
                cells = {
                    cell: Holdings(holder=self.there(self.slots[cell]), second_holder=self.there(self.copies[cell]))
                    for cell in CELLS
                }
                held = Held(cells=cells, checkpoint=self.checkpoint)
                return [Surveyed(generation=g, number=due.detail, held=held)]
            case "wait":
                return [WaitOver(generation=g)]
            case "save":
                self.has_given_up = True
                held = [cell for cell in CELLS if self.has(cell, due.detail)]
                if held == list(CELLS):
                    return [HeldSaved(generation=g, done=self.done(g, due.detail.step))]
                return [ControllerFailed(generation=g, message="what was held is gone")]
        raise AssertionError(due)

    def joins(self, due, owner):
        restore, step = due.detail, due.detail.step
        if not self.has(due.cell, restore):
            return [CellFailed(generation=due.g, error=self.error(due.cell, "raised"))]
        if self.has_lost_a_peer(due.cell) and self.draw(st.booleans()):
            return [CellBroke(generation=due.g, error=self.error(due.cell, "collateral"))]
        owner.position = owner.standing = step
        node, steps = self.slots[due.cell]
        self.slots[due.cell] = node, tuple(s for s in steps if s <= step)
        member = Member(worker="w", pid=1, node=str(owner.node), param_addr=0)
        return [CellReady(generation=due.g, cell=due.cell, member=member)]

    def runs(self, due, owner):
        if owner.position == self.until:
            return [CellEnded(generation=due.g, cell=due.cell, done=self.done(due.g, owner.position))]
        if self.has_lost_a_peer(due.cell):
            return [CellBroke(generation=due.g, error=self.error(due.cell, "collateral"))]
        self.due.append(due)
        owner.position = owner.standing = step = owner.position + 1
        node, steps = self.slots[due.cell]
        self.slots[due.cell] = owner.node, (*(steps if node == owner.node else ()), step)[-3:]
        seconds = sorted(self.nodes - {owner.node})
        if seconds and self.draw(st.booleans()):  # in the background, so that it may be behind
            node, steps = self.copies[due.cell]
            kept = steps if node == seconds[0] else ()
            self.copies[due.cell] = seconds[0], (*(s for s in kept if s != step), step)[-2:]
        self.committed = max(self.committed, min(other.position for other in self.owners.values()))
        if self.committed == step and step % 2 == 0:
            self.checkpoint = step
        return []

    def stands(self, due, owner):
        """The call that the cell is in ends first, one way or another."""
        calls = [call for call in self.due if call.cell == due.cell and call.what in ("join", "run")]
        self.due = [call for call in self.due if call not in calls]
        events = []
        for call in calls:
            if call.what == "run" and owner.position == self.until:
                events.append(CellEnded(generation=call.g, cell=due.cell, done=self.done(call.g, owner.position)))
            else:
                halfway = call.what == "run" or call.detail.sources[due.cell] != "live"
                if halfway and self.draw(st.integers(0, 4)) == 0:
                    owner.standing = None
                how = self.draw(st.sampled_from(("broke", "broke", "raised")))
                news = CellBroke if how == "broke" else CellFailed
                kind = "collateral" if how == "broke" else "raised"
                events.append(news(generation=call.g, error=self.error(due.cell, kind)))
        return [*events, CellDrained(generation=due.g, cell=due.cell, standing=owner.standing)]

    def room_for(self, cell):
        """A node for a new owner: the old one if it is there, else a spare one."""
        node = self.owners[cell].node
        if node in self.nodes:
            return node
        free = self.nodes - {owner.node for owner in self.owners.values() if owner.is_alive}
        return min(free) if free else None

    def replaces(self, due):
        if self.room_for(due.cell) is None and self.spares:
            self.add_node()
        node = self.room_for(due.cell)
        if node is None:  # the search goes on
            self.due.append(Due(what="replace", g=due.g, cell=due.cell, detail="told"))
            return [NoRoom(generation=due.g, missing="a node")]
        self.due = [other for other in self.due if not (other.what == "tether" and other.cell == due.cell)]
        self.owners[due.cell] = Owner(node=node)
        self.to_replace.discard(due.cell)
        return [CellPlaced(generation=due.g, cell=due.cell, worker="w")]

    def add_node(self):
        self.spares -= 1
        self.nodes.add(max(self.nodes, default=9) + 1)

    # What comes unasked.

    def strike(self, fault):
        """What the machine hears of a fault at once; more of it may be due."""
        at_work = [due for due in self.due if due.what in ("join", "run") and not self.owners[due.cell].is_frozen]
        match fault:
            case "process" if self.alive() and self.is_placed():
                self.die(self.draw(st.sampled_from(self.alive())), "died")
            case "node" if self.nodes and self.is_placed():
                node = self.draw(st.sampled_from(sorted(self.nodes)))
                self.nodes.remove(node)
                self.has_lost_a_node = True
                self.untold.add(node)
                for cell in CELLS:
                    if self.owners[cell].node == node:
                        self.die(cell, "node")
            case "freeze" if at_work:
                due = self.draw(st.sampled_from(at_work))
                self.owners[due.cell].is_frozen = True
                self.due.append(Due(what="watch", g=due.g, cell=due.cell))
            case "raise" | "final" if at_work:
                due = self.draw(st.sampled_from(at_work))
                self.due.remove(due)
                error = self.error(due.cell, "raised", final=fault == "final")
                return [CellFailed(generation=due.g, error=error)]
            case "cut" if at_work:
                due = self.draw(st.sampled_from(at_work))
                self.due.remove(due)
                return [CellBroke(generation=due.g, error=self.error(due.cell, "collateral"))]
            case "room":
                self.spares += 1
                self.add_node()
            case "stop":
                self.is_stop_told = True
                return [StopAsked(generation=max(1, self.generation - 1), by="signal")]
            case "controller":
                return [ControllerFailed(generation=max(1, self.generation - 1), message="disk full")]
        return []

    def is_placed(self):
        return not any(due.what == "place" for due in self.due)

    def die(self, cell, kind):
        owner = self.owners[cell]
        if not owner.is_alive:
            return
        owner.is_alive, owner.is_frozen, owner.kind = False, False, kind
        self.due = [due for due in self.due if due.cell != cell or due.what not in ("join", "run", "stand", "watch")]
        self.due.append(Due(what="tether", g=0, cell=cell))

    def error(self, cell, kind, *, final=False):
        error = CellError(cell=cell, worker="w", kind=kind, message=f"{kind}: {cell}", final=final)
        self.told.append(error)
        return error

    def done(self, g, step):
        return CellDone(generation=g, outcome="finished" if step == STEPS else "stopped", step=step)


@settings(max_examples=400)
@given(
    data=st.data(),
    faults=st.lists(st.sampled_from(FAULTS), max_size=8),
    max_failures=st.sampled_from((-1, -1, 0, 1, 2)),
    spares=st.integers(0, 2),
)
def test_whatever_fails_in_whatever_order_the_run_ends_and_never_waits_for_nothing(data, faults, max_failures, spares):
    world = World(data.draw, max_failures=max_failures, spares=spares)
    machine = Machine(Starting(generation=1, cells=CELLS, budget=Budget(max_failures=max_failures)))
    generations, faults = [1], list(faults)
    while not isinstance(machine.state, END_STATES):
        possible = [due for due in world.due if world.may_happen(due)]
        assert possible, f"nothing is due, but {machine.state} has not ended"
        answers = [due for due in possible if due.what not in ("deadline", "wait")]
        likely = answers if answers and data.draw(st.integers(0, 9)) else possible
        strikes = faults and data.draw(st.integers(0, 5)) == 0
        for event in world.strike(faults.pop()) if strikes else world.let_happen(data.draw(st.sampled_from(likely))):
            world.obey(machine.advance(event))
            generations.append(machine.state.generation)
    assert generations == sorted(generations)
    end = machine.state
    while late := [due for due in world.due if world.may_happen(due) and due.what != "run"]:  # it changes nothing
        assert all(machine.advance(event) == () for event in world.let_happen(late[0])) and machine.state is end
    if isinstance(end, Finished):
        assert end.done.step == STEPS or world.is_stop_told or world.has_given_up
    else:
        check_errors(end.errors, world)


def check_errors(errors, world):
    """A run fails for a reason, with what was told, and the cause before what it led to."""
    of_cells = [error for error in errors if error.cell]
    of_itself = [error for error in errors if not error.cell]
    assert all(error in world.told or error.kind == "silent" for error in of_cells)
    assert first_cause(errors).kind != "collateral" or {error.kind for error in errors} == {"collateral"}
    assert len({error.cell for error in of_cells}) == len(of_cells)
    if of_itself or any(error.final for error in of_cells) or world.max_failures == 0:
        return
    assert sum(error.kind != "node" for error in world.told) > world.max_failures > 0
