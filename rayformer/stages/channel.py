"""The messages between pipeline stages: tensors of one fixed shape, no headers, in order per direction.

Receives are posted ahead of their use, so that a message travels while this rank still computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from rayformer.groups import Group, Ticket
from rayformer.stages.instructions import Program, Recv, RecvAct, RecvGrad, Send, SendAct

_ACTIVATION, _GRADIENT = 0, 1  # tags: with two stages both directions share one pair of ranks
_MAX_IN_FLIGHT = 8
_POSTED_AHEAD = 2


class Channel:
    """Sends and receives activations and their gradients, each of ``shape``, over the ``pp`` group."""

    def __init__(self, pp: Group, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._pp = pp
        self._shape, self._dtype = tuple(shape), dtype
        self._in_flight: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._expected: dict[tuple[int, int], int] = {}
        self._posted: dict[tuple[int, int], deque[tuple[Ticket, torch.Tensor]]] = {}

    def begin(self, program: Program) -> None:
        """Post the first receives of ``program`` from each peer in each direction."""
        for instruction in program:
            if isinstance(instruction, RecvAct | RecvGrad):
                line = _line(instruction)
                self._expected[line] = self._expected.get(line, 0) + 1
        for line in self._expected:
            for _ in range(_POSTED_AHEAD):
                self._post(line)

    def send(self, message: Send, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` and keep it until it is gone.

        Waits for the oldest if too many are in flight: programs are checked to end even if every send waits.
        """
        if len(self._in_flight) == _MAX_IN_FLIGHT:
            self._in_flight.popleft()[0].wait()
        peer, tag = _line(message)
        tensor = tensor.contiguous()
        self._in_flight.append((self._pp.send(tensor, peer, tag), tensor))

    def recv(self, message: Recv) -> torch.Tensor:
        """Wait for the next tensor from the peer, and post the receive of one further on."""
        line = _line(message)
        if not self._posted.get(line):  # outside of a program
            self._expected[line] = 1
            self._post(line)
        ticket, tensor = self._posted[line].popleft()
        ticket.wait()
        self._post(line)
        return tensor

    def finish(self) -> None:
        """Wait until everything sent is gone; everything posted has been received."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        assert not any(self._posted.values()), "a receive was posted that the program did not use"
        self._expected.clear()
        self._posted.clear()

    def forget(self) -> None:
        """Nothing that is in flight will arrive: the group behind it is gone."""
        self._in_flight.clear()
        self._expected.clear()
        self._posted.clear()

    def _post(self, line: tuple[int, int]) -> None:
        if self._expected[line] == 0:
            return
        self._expected[line] -= 1
        peer, tag = line
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._pp.device)
        self._posted.setdefault(line, deque()).append((self._pp.recv(tensor, peer, tag), tensor))


def _line(message: Send | Recv) -> tuple[int, int]:
    """The peer and the tag of a message's direction."""
    return message.peer, _ACTIVATION if isinstance(message, SendAct | RecvAct) else _GRADIENT
