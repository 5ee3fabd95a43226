"""The messages between pipeline stages: tensors of one fixed shape, no headers, in order per direction.

Receives are posted ahead of their use, so that a message travels while this rank still computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayformer.groups import Group, Ticket
from rayformer.stages.instructions import Program, Recv, RecvAct, RecvGrad, Send, SendAct

_ACTIVATION, _GRADIENT = 0, 1  # tags: with two stages both directions share one pair of ranks
_MAX_IN_FLIGHT = 8
_POSTED_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """What ``message`` is to bring; ``wait()`` gives it when it is here."""

    message: Recv
    ticket: Ticket
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.ticket.wait()
        return self.tensor


class Channel:
    """Sends and receives activations and their gradients, each of ``shape``, over the ``pp`` group."""

    def __init__(self, pp: Group, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._pp = pp
        self._buffers = _Buffers(shape, dtype, pp.device)
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

    def recv(self, message: Recv) -> Arrival:
        """The next tensor from the peer, and post the receive of one further on."""
        line = _line(message)
        if not self._posted.get(line):  # outside of a program
            self._expected[line] = 1
            self._post(line)
        arrival = Arrival(message, *self._posted[line].popleft())
        self._post(line)
        return arrival

    def finish(self) -> None:
        """Wait until everything sent is gone; everything posted has been received."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        assert not any(self._posted.values()), "a receive was posted that the program did not use"
        self._expected.clear()
        self._posted.clear()

    def forget(self) -> None:
        """Nothing that is in flight will arrive: the group behind it is gone."""
        self._buffers.forget()
        self._in_flight.clear()
        self._expected.clear()
        self._posted.clear()

    def _post(self, line: tuple[int, int]) -> None:
        if self._expected[line] == 0:
            return
        self._expected[line] -= 1
        peer, tag = line
        tensor = self._buffers.take()
        self._posted.setdefault(line, deque()).append((self._pp.recv(tensor, peer, tag), tensor))


class _Buffers:
    """Tensors of one shape to receive into; their memory is used again as soon as nothing else holds it.

    A graph may hold what arrived, and so may a message that passes it on: who else does is asked of the memory itself.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._known: deque[tuple[torch.Tensor, torch.UntypedStorage]] = deque()

    def take(self) -> torch.Tensor:
        for _ in range(min(len(self._known), _LOOKED_AT)):
            self._known.rotate(-1)
            tensor, storage = self._known[-1]
            if torch._C._storage_Use_Count(storage._cdata) == _UNUSED:
                return tensor.detach()  # holds the memory as long as somebody holds it
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._known.append((tensor, tensor.untyped_storage()))
        return tensor.detach()

    def forget(self) -> None:
        """Something may still write into them."""
        self._known.clear()


_LOOKED_AT = 4  # they become free in about the order in which they were taken
_UNUSED = 2  # holders of memory that only `_known` holds, as a tensor and as itself


def _line(message: Send | Recv) -> tuple[int, int]:
    """The peer and the tag of a message's direction."""
    return message.peer, _ACTIVATION if isinstance(message, SendAct | RecvAct) else _GRADIENT
