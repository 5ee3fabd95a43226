"""Which cell makes no progress and is what others wait for. Pure: what is seen is given, and so are all times.

Each cell's progress word says what it began and when. A cell in a wait (a message, an exchange, the vote) waits for
others; one in anything else is at work. Blame goes to the sink of the waits: to a process that is stopped, then to the
cell at work, then, if all of them wait, to the one that has come least far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

STOPPED_S = 0.25  # a process that somebody stops for less is left alone
LEAST_S = 5.0  # no deadline is shorter
STEPS = 8  # an ordinary deadline is as long as so many of the slowest steps
LONG_FACTOR, LONG_S = 10, 60.0  # phases whose length follows no step
LONG_PHASES = frozenset({"setup", "load", "save", "eval", "joining", "idle"})
_WAITS = frozenset({"RecvAct", "RecvGrad", "SendAct", "SendGrad", "AwaitParams"})
_WAITING_PHASES = frozenset({"reduce", "vote", "save", "eval", "joining", "idle"})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A cell from outside: the last thing that it began, so many words since its start, and ``age_s`` seconds ago."""

    step: int
    phase: str
    instruction: str
    number: int
    count: int
    age_s: float
    is_stopped: bool

    @property
    def waits(self) -> bool:
        return self.instruction in _WAITS if self.instruction else self.phase in _WAITING_PHASES

    @property
    def doing(self) -> str:
        what = f"{self.instruction} of {self.number}" if self.instruction else self.phase
        return f"{what} in step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """``cell`` is to be replaced: what it is in, for how long, who waits for it, and why it was chosen."""

    cell: str
    seen: Seen
    waiters: tuple[str, ...]
    reason: str

    @property
    def message(self) -> str:
        num = len(self.waiters)
        waiting = f", and {num} cell{'s wait' if num > 1 else ' waits'} for it" if num else ""
        return f"it has been in {self.seen.doing} for {self.seen.age_s:.1f} s{waiting}: {self.reason}"


class StallJudge:
    """Looks at all cells again and again. ``stall_s`` is the deadline, None to follow the steps that were seen.

    The first step of a generation may take as long as what follows no step: a new process compiles in it.
    """

    def __init__(self, stall_s: float | None) -> None:
        self._stall_s = stall_s
        self._step_s: deque[float] = deque(maxlen=1000)
        self._longest_first_s = 0.0
        self._is_first = True

    def start_generation(self) -> None:
        """The next step is the first one of its generation."""
        self._is_first = True

    def note_step(self, step_s: float) -> None:
        """A step took so long."""
        if self._is_first:
            self._longest_first_s = max(self._longest_first_s, step_s)
            self._is_first = False
        else:
            self._step_s.append(step_s)

    @property
    def deadline_s(self) -> float:
        """Seconds that a cell may spend in one instruction or phase of a step."""
        if self._stall_s is not None:
            return self._stall_s
        slowest = max(self._step_s, default=0.0)
        return max(LEAST_S, STEPS * slowest) if self._step_s else LONG_S

    def judge(self, cells: Mapping[str, Seen], *, silent: frozenset[str] = frozenset()) -> Stall | None:
        """The cell to blame, if a deadline is over; ``silent`` cells did not answer when asked."""
        for cell, seen in cells.items():
            if seen.is_stopped and seen.age_s > STOPPED_S:
                return self._stall(cell, cells, "its process is stopped")
        if not cells or any(seen.age_s < self._limit(seen) for seen in cells.values()):
            return None
        at_work = [cell for cell, seen in cells.items() if not seen.waits]
        mute = [cell for cell in cells if cell in silent]
        for chosen, reason in (
            (mute, "it does not answer"),
            (at_work, "the others wait for it"),
            (list(cells), "all cells wait, and it has come least far"),
        ):
            if chosen:
                cell = min(chosen, key=lambda c: (cells[c].step, cells[c].count, -cells[c].age_s))
                return self._stall(cell, cells, f"{reason}; {self._limit(cells[cell]):.1f} s are allowed")
        return None

    def is_suspicious(self, cells: Mapping[str, Seen]) -> bool:
        """Whether it is time to ask the cells whether they answer."""
        return bool(cells) and all(seen.age_s > self._limit(seen) / 2 for seen in cells.values())

    def _limit(self, seen: Seen) -> float:
        if self._is_first or seen.phase in LONG_PHASES:
            return max(LONG_S, LONG_FACTOR * self.deadline_s, STEPS * self._longest_first_s)
        return self.deadline_s

    def _stall(self, cell: str, cells: Mapping[str, Seen], reason: str) -> Stall:
        waiters = tuple(other for other, seen in cells.items() if other != cell and seen.waits)
        return Stall(cell=cell, seen=cells[cell], waiters=waiters, reason=reason)
