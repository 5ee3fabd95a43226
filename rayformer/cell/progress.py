"""The progress word: what a cell is doing, readable from outside even when its process is frozen.

It lies at the head of the cell's slots, so that whoever owns these sees it without asking the cell. Phases and
instructions are written as numbers; a reader that catches the word half-written sees the time of the one before.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from rayformer.ckpt.slots import PROGRESS_AT, WORKED_AT
from rayformer.control.straggle import Worked

Phase = Literal[
    "setup", "load", "data", "forward", "backward", "reduce", "vote", "update", "gather", "snapshot", "eval", "save",
    "idle", "joining",
]  # fmt: skip
PHASES: tuple[Phase, ...] = get_args(Phase)
INSTRUCTIONS = (
    "", "Forward", "Backward", "SendAct", "RecvAct", "SendGrad", "RecvGrad", "FoldGrads", "ReduceGrads", "AwaitParams",
    "InputGrad", "WeightGrad",
)  # fmt: skip
_WORD = struct.Struct("<qqqqqd")  # count of words, step, phase, instruction, its microbatch or bucket, monotonic time


_WORKED = struct.Struct("<qd")  # step, seconds


class Progress(Protocol):
    """Is told what the cell begins, how long it computed in a step, and when its memory is another."""

    def at(self, phase: Phase, step: int, instruction: str = "", number: int = -1) -> None: ...

    def worked(self, step: int, seconds: float) -> None: ...

    def move(self, memory: mmap.mmap) -> None: ...


class NoProgress:
    """For cells that nobody watches."""

    def at(self, phase: Phase, step: int, instruction: str = "", number: int = -1) -> None:
        pass

    def worked(self, step: int, seconds: float) -> None:
        pass

    def move(self, memory: mmap.mmap) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a cell was doing at ``time``, on the clock that all processes of its machine share, in seconds."""

    count: int
    step: int
    phase: Phase
    instruction: str
    number: int
    time: float


class ProgressWord:
    """Writes into the head of ``memory``."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._count = 0

    def move(self, memory: mmap.mmap) -> None:
        """Write into other memory from now on."""
        self._memory = memory

    def at(self, phase: Phase, step: int, instruction: str = "", number: int = -1) -> None:
        self._count += 1
        _WORD.pack_into(
            self._memory, PROGRESS_AT, self._count, step, PHASES.index(phase), INSTRUCTIONS.index(instruction), number,
            time.monotonic(),
        )  # fmt: skip

    def worked(self, step: int, seconds: float) -> None:
        """``step`` is done, and this cell has computed so long in it, without what it waited."""
        _WORKED.pack_into(self._memory, WORKED_AT, step, seconds)


def read_word(memory: mmap.mmap) -> Word:
    """The word in the head of ``memory``."""
    count, step, phase, instruction, number, at = _WORD.unpack_from(memory, PROGRESS_AT)
    return Word(
        count=count, step=step, phase=PHASES[phase], instruction=INSTRUCTIONS[instruction], number=number, time=at
    )


def forget_word(memory: mmap.mmap) -> None:
    """Leave no word, as before the first one."""
    _WORD.pack_into(memory, PROGRESS_AT, *[0] * 6)


def read_worked(memory: mmap.mmap) -> Worked:
    """The last step that the cell has done, and for how long it computed."""
    step, seconds = _WORKED.unpack_from(memory, WORKED_AT)
    return Worked(step=step, seconds=seconds)
