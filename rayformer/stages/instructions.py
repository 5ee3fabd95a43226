"""The instructions a pipeline rank executes in one step, and where its chunks lie in the model.

Ranks are pp coordinates; microbatches are numbered from 0 on each rank; `chunk` is always the acting rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class _OfMicrobatch:
    microbatch: int
    chunk: int = 0

    def _suffix(self) -> str:
        return f"{self.microbatch}c{self.chunk}" if self.chunk else str(self.microbatch)


@dataclass(frozen=True, slots=True)
class _Compute(_OfMicrobatch):
    part: tuple[int, int] | None = None
    letter: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.letter}{self._suffix()}{'' if self.part is None else '[{}:{}]'.format(*self.part)}"


@dataclass(frozen=True, slots=True)
class Forward(_Compute):
    """Run a chunk forward: `F3`, and `F3c1` on chunk 1; with a part only these of its segments, `F3[0:2]`."""

    letter: ClassVar[str] = "F"


@dataclass(frozen=True, slots=True)
class Backward(_Compute):
    """Run a chunk backward and accumulate its weight gradients: `B3`; a part is run from its end to its start."""

    letter: ClassVar[str] = "B"


@dataclass(frozen=True, slots=True)
class InputGrad(_Compute):
    """The part of a Backward that the stage before waits for, the gradient of the chunk's input: `B3` beside `W3`."""

    letter: ClassVar[str] = "B"


@dataclass(frozen=True, slots=True)
class WeightGrad(_Compute):
    """The rest of that Backward: accumulate the gradients of the chunk's weights: `W3`."""

    letter: ClassVar[str] = "W"


@dataclass(frozen=True, slots=True)
class _Transfer(_OfMicrobatch):
    peer: int = field(kw_only=True)
    payload: ClassVar[str]
    arrow: ClassVar[str]

    def __str__(self) -> str:
        return f"{type(self).__name__}{self._suffix()}{self.arrow}{self.peer}"


@dataclass(frozen=True, slots=True)
class SendAct(_Transfer):
    """Send the output of a Forward to the next stage, on rank `peer`: `SendAct3>1`."""

    payload: ClassVar[str] = "activation"
    arrow: ClassVar[str] = ">"


@dataclass(frozen=True, slots=True)
class RecvAct(_Transfer):
    """Receive the input of a Forward from the previous stage, on rank `peer`: `RecvAct3<0`."""

    payload: ClassVar[str] = "activation"
    arrow: ClassVar[str] = "<"


@dataclass(frozen=True, slots=True)
class SendGrad(_Transfer):
    """Send the input's gradient from a Backward or InputGrad to the previous stage, on rank `peer`: `SendGrad3>0`."""

    payload: ClassVar[str] = "gradient"
    arrow: ClassVar[str] = ">"


@dataclass(frozen=True, slots=True)
class RecvGrad(_Transfer):
    """Receive the output's gradient for a Backward or InputGrad from the next stage, on rank `peer`: `RecvGrad3<1`."""

    payload: ClassVar[str] = "gradient"
    arrow: ClassVar[str] = "<"


@dataclass(frozen=True, slots=True)
class FoldGrads:
    """Virtual rank `leaf`, not the last of this rank, has accumulated all its microbatches in a chunk: fold these."""

    leaf: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"Fold{self.leaf}c{self.chunk}" if self.chunk else f"Fold{self.leaf}"


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """One bucket's gradients are complete: fold the last virtual rank's, and start to reduce-scatter over dp."""

    bucket: int

    def __str__(self) -> str:
        return f"Reduce{self.bucket}"


@dataclass(frozen=True, slots=True)
class AwaitParams:
    """Wait until one bucket's parameters, updated by their owners in the last step, are all here."""

    bucket: int

    def __str__(self) -> str:
        return f"Await{self.bucket}"


Compute: TypeAlias = Forward | Backward | InputGrad | WeightGrad
Send: TypeAlias = SendAct | SendGrad
Recv: TypeAlias = RecvAct | RecvGrad
Instruction: TypeAlias = Compute | Send | Recv | FoldGrads | ReduceGrads | AwaitParams
Program: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMap:
    """Which global stage, counted from the model's input, each rank's chunks are.

    Stages go round the ranks, from the last on to the first; with ``vee`` they turn back at the last rank, and again at
    the first, so that a rank that turns holds two stages in a row.

    >>> stages = StageMap(pp=4, chunks=2)
    >>> stages.stage(rank=1, chunk=1), stages.rank(5), stages.chunk(5), stages.last
    (5, 1, 1, 7)
    >>> [StageMap(pp=4, chunks=2, vee=True).rank(stage) for stage in range(8)]
    [0, 1, 2, 3, 3, 2, 1, 0]
    """

    pp: int
    chunks: int = 1
    vee: bool = False

    @property
    def first(self) -> int:
        return 0

    @property
    def last(self) -> int:
        return self.pp * self.chunks - 1

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.pp + self._turned(rank, chunk)

    def rank(self, stage: int) -> int:
        return self._turned(stage % self.pp, self.chunk(stage))

    def chunk(self, stage: int) -> int:
        return stage // self.pp

    def next_chunk(self, rank: int, chunk: int) -> int | None:
        """The rank's chunk that follows its ``chunk`` in the model; None if the next stage is another rank's, or none.

        >>> StageMap(pp=4, chunks=2, vee=True).next_chunk(3, 0)
        1
        """
        stage = self.stage(rank, chunk)
        return self.chunk(stage + 1) if stage < self.last and self.rank(stage + 1) == rank else None

    def _turned(self, place: int, chunk: int) -> int:
        return self.pp - 1 - place if self.vee and chunk % 2 else place


def stages_of(programs: Sequence[Iterable[Instruction]], *, vee: bool = False) -> StageMap:
    """Where the chunks lie that these programs, one per rank, compute with."""
    ops = (op for program in programs for op in program if isinstance(op, _Compute))
    return StageMap(pp=len(programs), chunks=1 + max((op.chunk for op in ops), default=0), vee=vee)
