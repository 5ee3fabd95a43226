"""Faults in a cell: a decorator of its progress word, which carries them out where they are due."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence

from rayformer.cell.progress import Phase, Progress
from rayformer.faults.plan import CONTROLLER_EFFECTS, OF_MICROBATCHES, Fault


class FaultyProgress:
    """Tells ``inner`` what the cell begins, and then lets those of its faults happen that are due there.

    ``used`` says how often a fault has happened in the whole run. Before it happens, ``mark`` is told of its number,
    step and phase: that must be durable. A fault happens at most once in each execution of a step. ``poison`` makes a
    gradient NaN, ``kill_holder`` kills the process that owns the memory of the cell's snapshots.
    """

    def __init__(
        self,
        inner: Progress,
        faults: Sequence[Fault],
        *,
        cell: str,
        used: Callable[[int], int],
        mark: Callable[[int, int, Phase], None],
        poison: Callable[[], None],
        kill_holder: Callable[[], None],
    ) -> None:
        self._inner, self._used, self._mark = inner, used, mark
        self._poison, self._kill_holder = poison, kill_holder
        own = [fault for fault in faults if fault.cell == cell and fault.effect not in CONTROLLER_EFFECTS]
        self._own = sorted(own, key=lambda fault: fault.effect != "kill_holder")  # before the cell itself is killed
        self._step = -1
        self._happened: set[int] = set()  # in this execution of the step

    def at(self, phase: Phase, step: int, instruction: str = "", number: int = -1) -> None:
        self._inner.at(phase, step, instruction, number)
        if step != self._step or phase in ("data", "joining", "load", "setup"):
            self._step, self._happened = step, set()
        for fault in self._own:
            if (
                _is_there(fault, phase, instruction, number)
                and fault.is_due(step)
                and fault.number not in self._happened
                and self._used(fault.number) < fault.times
            ):
                self._happened.add(fault.number)
                self._mark(fault.number, step, phase)
                carry_out(fault, step, poison=self._poison, kill_holder=self._kill_holder)

    def worked(self, step: int, seconds: float) -> None:
        self._inner.worked(step, seconds)

    def move(self, memory: mmap.mmap) -> None:
        self._inner.move(memory)


def carry_out(fault: Fault, step: int, *, poison: Callable[[], None], kill_holder: Callable[[], None]) -> None:
    """Let ``fault`` happen to this process."""
    match fault.effect:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)
        case "raise":
            raise RuntimeError(f"fault {fault.number} of the job: raise {fault.cell} at {fault.at} of step {step}")
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "gil":
            hold_gil(_seconds(fault))
        case "slow":
            time.sleep(_seconds(fault))
        case "nan":
            poison()
        case "kill_holder":
            kill_holder()
        case _:
            raise AssertionError(f"{fault.effect} does not happen in a cell: {fault}")


def hold_gil(seconds: float) -> None:
    """Sleep without letting another thread of this process run Python."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def _is_there(fault: Fault, phase: Phase, instruction: str, number: int) -> bool:
    if fault.at not in (phase, instruction):
        return False
    return fault.microbatch is None or (instruction in OF_MICROBATCHES and number == fault.microbatch)


def _seconds(fault: Fault) -> float:
    assert fault.seconds is not None, f"how long? {fault}"
    return fault.seconds
