"""The messages between pipeline stages: tensors of one fixed shape, no headers, in order per direction.

Receives are posted ahead of their use, so that a message travels while this rank still computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch

from rayformer.groups import Group, Ticket
from rayformer.stages.instructions import Program, Recv, RecvAct, RecvGrad, Send, SendAct, SendGrad

_Line: TypeAlias = tuple[int, int]  # peer and tag
_Posted: TypeAlias = tuple[Ticket, torch.Tensor]
_TAGS = {SendAct: 0, RecvAct: 0, SendGrad: 1, RecvGrad: 1}  # with two stages both directions share one pair of ranks
_MAX_IN_FLIGHT = 8
_POSTED_AHEAD = 2


class Arrival:
    """What ``message`` is to bring; ``wait()`` gives it when it is here."""

    __slots__ = ("_posted", "message")

    def __init__(self, message: Recv, posted: _Posted) -> None:
        self.message, self._posted = message, posted

    def wait(self) -> torch.Tensor:
        ticket, tensor = self._posted
        ticket.wait()
        return tensor


class Channel:
    """Sends and receives activations and their gradients, each of ``shape``, over the ``pp`` group."""

    def __init__(self, pp: Group, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._pp, self.device = pp, pp.device
        self._buffers = _Buffers(shape, dtype, pp.device)
        self._in_flight: deque[_Posted] = deque()
        self._expected: dict[_Line, int] = {}
        self._due: list[_Line] = []
        self._posted: dict[_Line, deque[_Posted]] = {}

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
        self._post_due()
        peer, tag = _line(message)
        tensor = tensor.contiguous()
        self._in_flight.append((self._pp.send(tensor, peer, tag), tensor))

    def recv(self, message: Recv) -> Arrival:
        """The next tensor from the peer.

        The receive of one further on is posted with the next message, sent or received: at the moment it would be in
        the way of the tensor that comes in, and of whoever waits for it.
        """
        line = _line(message)
        self._post_due()
        self._due.append(line)
        return Arrival(message, self._posted[line].popleft())

    def finish(self) -> None:
        """Wait until everything sent is gone; everything posted has been received."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        assert not any(self._posted.values()), "a receive was posted that the program did not use"
        self._expected.clear()
        self._posted.clear()
        self._due.clear()

    def forget(self) -> None:
        """Nothing that is in flight will arrive: the group behind it is gone."""
        self._buffers.forget()
        self._in_flight.clear()
        self._expected.clear()
        self._posted.clear()
        self._due.clear()

    def _post_due(self) -> None:
        for line in self._due:
            self._post(line)
        self._due.clear()

    def _post(self, line: _Line) -> None:
        if self._expected[line] == 0:
            return
        self._expected[line] -= 1
        tensor = self._buffers.take()
        self._posted.setdefault(line, deque()).append((self._pp.recv(tensor, *line), tensor))


class _Buffers:
    """Tensors of one shape to receive into; their memory is used again as soon as nothing else holds it.

    A graph may hold what arrived, and so may a message that passes it on: who else does is asked of the memory itself.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._known: deque[tuple[torch.Tensor, torch.UntypedStorage]] = deque()

    def take(self) -> torch.Tensor:
        """Memory that nobody uses; what is given holds it."""
        for _ in range(min(len(self._known), _LOOKED_AT)):
            tensor, storage = self._known[0]
            self._known.rotate(-1)
            if torch._C._storage_Use_Count(storage._cdata) == _UNUSED:
                return tensor.detach()
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._known.append((tensor, tensor.untyped_storage()))
        return tensor.detach()

    def forget(self) -> None:
        """Something may still write into them."""
        self._known.clear()


_LOOKED_AT = 4  # they become free in about the order in which they were taken
_UNUSED = 2  # holders of memory that only `_known` holds, as a tensor and as itself


def _line(message: Send | Recv) -> _Line:
    """The peer and the tag of a message's direction."""
    return message.peer, _TAGS[type(message)]
