"""The instructions a pipeline rank executes in one step, and where its chunks lie in the model.

Ranks are pp coordinates; microbatches are numbered from 0 on each rank; `chunk` is always the acting rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class _OfMicrobatch:
    microbatch: int
    chunk: int = 0

    def _suffix(self) -> str:
        return f"{self.microbatch}c{self.chunk}" if self.chunk else str(self.microbatch)


@dataclass(frozen=True, slots=True)
class Forward(_OfMicrobatch):
    """Run a chunk forward: `F3`, and `F3c1` on chunk 1."""

    def __str__(self) -> str:
        return f"F{self._suffix()}"


@dataclass(frozen=True, slots=True)
class Backward(_OfMicrobatch):
    """Run a chunk backward and accumulate its weight gradients: `B3`."""

    def __str__(self) -> str:
        return f"B{self._suffix()}"


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
    """Send the input's gradient from a Backward to the previous stage, on rank `peer`: `SendGrad3>0`."""

    payload: ClassVar[str] = "gradient"
    arrow: ClassVar[str] = ">"


@dataclass(frozen=True, slots=True)
class RecvGrad(_Transfer):
    """Receive the output's gradient for a Backward from the next stage, on rank `peer`: `RecvGrad3<1`."""

    payload: ClassVar[str] = "gradient"
    arrow: ClassVar[str] = "<"


@dataclass(frozen=True, slots=True)
class FoldGrads:
    """Virtual rank `leaf` has accumulated all its microbatches: close it and fold the subtrees now complete."""

    leaf: int

    def __str__(self) -> str:
        return f"Fold{self.leaf}"


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """Reduce-scatter one bucket of gradients over the data-parallel group."""

    bucket: int

    def __str__(self) -> str:
        return f"Reduce{self.bucket}"


Compute: TypeAlias = Forward | Backward
Send: TypeAlias = SendAct | SendGrad
Recv: TypeAlias = RecvAct | RecvGrad
Instruction: TypeAlias = Compute | Send | Recv | FoldGrads | ReduceGrads
Program: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMap:
    """Which global stage, counted from the model's input, each rank's chunks are: stages go round the ranks.

    >>> stages = StageMap(pp=4, chunks=2)
    >>> stages.stage(rank=1, chunk=1), stages.rank(5), stages.chunk(5), stages.last
    (5, 1, 1, 7)
    """

    pp: int
    chunks: int = 1

    @property
    def first(self) -> int:
        return 0

    @property
    def last(self) -> int:
        return self.pp * self.chunks - 1

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.pp + rank

    def rank(self, stage: int) -> int:
        return stage % self.pp

    def chunk(self, stage: int) -> int:
        return stage // self.pp
