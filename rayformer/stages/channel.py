"""The messages between pipeline stages: tensors of one fixed shape, no headers, in order per direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from rayformer.groups import Group, Ticket
from rayformer.stages.instructions import Recv, RecvAct, Send, SendAct

_ACTIVATION, _GRADIENT = 0, 1  # tags: with two stages both directions share one pair of ranks
_MAX_IN_FLIGHT = 8


class Channel:
    """Sends and receives activations and their gradients, each of ``shape``, over the ``pp`` group."""

    def __init__(self, pp: Group, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._pp = pp
        self._shape, self._dtype = tuple(shape), dtype
        self._in_flight: deque[tuple[Ticket, torch.Tensor]] = deque()

    def send(self, message: Send, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` and keep it until it is gone.

        Waits for the oldest if too many are in flight: programs are checked to end even if every send waits.
        """
        if len(self._in_flight) == _MAX_IN_FLIGHT:
            self._in_flight.popleft()[0].wait()
        tag = _ACTIVATION if isinstance(message, SendAct) else _GRADIENT
        tensor = tensor.contiguous()
        self._in_flight.append((self._pp.send(tensor, message.peer, tag), tensor))

    def recv(self, message: Recv) -> torch.Tensor:
        """Wait for the next tensor from the peer."""
        tag = _ACTIVATION if isinstance(message, RecvAct) else _GRADIENT
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._pp.device)
        self._pp.recv(tensor, message.peer, tag).wait()
        return tensor

    def flush(self) -> None:
        """Wait until everything sent is gone."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
