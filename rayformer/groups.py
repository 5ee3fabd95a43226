"""Live communicators: form the groups of one generation, use them, abort or close them.

A group of one member is an ordinary group that has nobody to talk to. Every operation gives a Ticket; one place alone
holds the backend object and its Works, so that nothing else can keep a connection open (docs/design/0003).
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from rayformer.errors import CollectiveError
from rayformer.layout import Cell, Layout

Op = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_PAIR, _NEVER_SENT = 2**31 - 2, 2**31 - 1  # tags
CONNECT_S = 5.0  # seconds that a connection may take to come about, when everybody is there
GROUP_AXES = (("tp",), ("dp",), ("pp",), ("tp", "pp"), ("tp", "cp", "dp", "pp"))


class _Message:
    """A send or receive on Gloo, whose own timeout is that of connecting: a wait names another."""

    __slots__ = ("_timeout", "_work")

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        self._work.wait(self._timeout)


class _Messages:
    """Sends and receives as one Work."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        while self._works:
            self._works.pop().wait()


class Ticket:
    """A claim on one operation in flight; ``wait()`` returns when it is complete and raises CollectiveError if not."""

    def __init__(self, communicator: Communicator, number: int | None) -> None:
        self._communicator = communicator
        self._number = number
        self.then: Callable[[], object] | None = None  # what is left to do on this side when it is complete

    def wait(self) -> None:
        if self._number is not None:
            self._communicator.wait(self._number)
            self._number = None
        if self.then is not None:
            then, self.then = self.then, None
            then()


class Communicator:
    """The live connection of some ranks; alone holds the backend object and the Works of operations in flight.

    ``waited_s`` are the seconds that threads of this process have been blocked in waits: what communication cost them.
    """

    def __init__(self, ranks: Sequence[int], backend: Any, *, timeout: timedelta | None = None) -> None:
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.waited_s = 0.0
        self._backend = backend
        self._works: dict[int, Any] = {}
        self._num_started = 0

    def start(self, name: str, over: str, operation: Callable[[Any], Any]) -> Ticket:
        backend = self._backend
        if backend is None:
            raise CollectiveError(f"{self}: {name} over {over} after the group was aborted")
        self._num_started = number = self._num_started + 1
        try:
            self._works[number] = operation(backend)
        except RuntimeError as error:
            raise CollectiveError(f"{self}: {name} over {over} could not start: {error}") from error
        return Ticket(self, number)

    def wait(self, number: int) -> None:
        work = self._works.get(number)
        if work is None:
            raise CollectiveError(f"{self}: the group was aborted while an operation was in flight")
        started = time.perf_counter()
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"{self}: a peer did not answer: {error}") from error
        finally:
            self.waited_s += time.perf_counter() - started
            self._works.pop(number, None)
            del work  # or the traceback of the error would keep it

    def abort(self) -> None:
        """Close the connections and let the backend go, so that this member and peers blocked on it raise."""
        backend, self._backend = self._backend, None
        self._works.clear()
        if backend is None:
            return
        if backend.name() == "nccl":
            backend.abort()
            return
        # Gloo's abort does nothing, but a wait that times out closes every connection of the group, on whatever thread
        # others wait in it. So receive what nobody sends.
        with suppress(RuntimeError):
            peer = (backend.rank() + 1) % backend.size()
            backend.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def __str__(self) -> str:
        return f"group of ranks {list(self.ranks)}"


class Group:
    """A communicator over some axes of the layout, of one generation.

    ``ranks`` are the members' ranks in the layout, ``rank`` is the place among them. ``calls`` and ``sent_bytes`` count
    what was asked of the group by operation: bytes are those of the tensors handed over, whatever algorithm moves them.
    Groups over other axes with the same members share the communicator. Two members on Gloo exchange their tensors
    directly: its collectives take up to twice as long.
    """

    def __init__(self, *, axes: Sequence[str], communicator: Communicator, rank: int, device: torch.device) -> None:
        self.axes = tuple(axes)
        self.rank = rank
        self.device = device
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self._communicator = communicator
        self.size = len(communicator.ranks)
        self._over = "-".join(self.axes)
        self._is_pair = self.size == 2 and device.type == "cpu"

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._communicator.ranks

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Ticket:
        """Reduce ``tensor`` over the group, in place."""
        if self._is_pair and op == "sum":
            theirs = torch.empty_like(tensor)
            ticket = self._exchange("all_reduce", tensor, tensor, theirs)
            ticket.then = lambda: tensor.add_(theirs)
            return ticket

        def start(backend: Any) -> Any:
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]
            return backend.allreduce([tensor], options)

        return self._start("all_reduce", tensor, start)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Ticket:
        """Every member's ``tensor`` [n] one after the other in ``out`` [size * n]."""
        if self.size == 1 and out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor.view_as(out))
        if self._is_pair:
            pieces = out.view(2, -1)
            if pieces[self.rank].data_ptr() != tensor.data_ptr():
                pieces[self.rank].copy_(tensor.view(-1))
            return self._exchange("all_gather", tensor, tensor, pieces[1 - self.rank])
        return self._start("all_gather", tensor, lambda backend: backend._allgather_base(out, tensor))

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Ticket:
        """Send piece j of ``tensor`` to member j and receive its piece; splits are lengths along dim 0."""
        if self.size == 1 and out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        if self._is_pair:
            received, sent = out.split(list(out_splits)), tensor.split(list(in_splits))
            received[self.rank].copy_(sent[self.rank])
            return self._exchange("all_to_all", tensor, sent[1 - self.rank], received[1 - self.rank])
        return self._start(
            "all_to_all", tensor, lambda backend: backend.alltoall_base(out, tensor, list(out_splits), list(in_splits))
        )

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Ticket:
        """The own piece [n] of the sum of every member's ``tensor`` [size * n], whose pieces add in rank order on Gloo.

        Gloo's own reduce-scatter takes four times as long as sending the pieces and adding them.
        """
        if self.device.type == "cuda" and self.size > 1:
            return self._start("reduce_scatter", tensor, lambda backend: backend._reduce_scatter_base(out, tensor))
        flat = out.view(-1)
        if self._is_pair:
            mine = tensor.view(2, -1)
            theirs = torch.empty_like(flat)
            ticket = self._exchange("reduce_scatter", tensor, mine[1 - self.rank], theirs)
            ticket.then = lambda: torch.add(mine[self.rank], theirs, out=flat)
            return ticket
        pieces = tensor.view(1, -1) if self.size == 1 else tensor.new_empty(self.size, out.numel())

        def add() -> None:
            flat.copy_(pieces[0])
            for piece in pieces[1:]:
                flat.add_(piece)

        splits = [out.numel()] * self.size
        started = self._start(
            "reduce_scatter", tensor, lambda backend: backend.alltoall_base(pieces.view(-1), tensor, splits, splits)
        )
        started.then = add
        return started

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        """The ``tensor`` of member ``root`` in everybody's, in place."""

        def start(backend: Any) -> Any:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            return backend.broadcast([tensor], options)

        return self._start("broadcast", tensor, start)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Ticket:
        """Send ``tensor`` to member ``to``; it must not change until the ticket has been waited for."""
        return self._start("send", tensor, lambda backend: self._message(backend.send([tensor], to, tag)))

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Ticket:
        """Receive into ``tensor`` what member ``source`` sends under ``tag``, in the order of sending."""
        return self._start("recv", tensor, lambda backend: self._message(backend.recv([tensor], source, tag)))

    def gather_values(self, value: Any) -> list[Any]:
        """Every member's ``value``, which must be representable in JSON, in rank order."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=self.device)
        self.all_gather(sizes, torch.tensor([data.numel()], device=self.device)).wait()
        width = int(sizes.max())
        padded = torch.zeros(width, dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        out = torch.empty(width * self.size, dtype=torch.uint8, device=self.device)
        self.all_gather(out, padded).wait()
        rows = out.view(self.size, width).cpu()
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, sizes.tolist())]

    def barrier(self) -> None:
        """Return when every member has come here."""
        present = torch.ones(1, device=self.device)
        self.all_reduce(present).wait()
        assert int(present) == self.size  # reading it waits for the device too

    def _exchange(self, name: str, handed: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> Ticket:
        """Send to the other of two members and receive from it; ``handed`` is what counts as sent."""
        peer = 1 - self.rank
        return self._start(
            name,
            handed,
            lambda backend: self._messages(backend.send([sent], peer, _PAIR), backend.recv([received], peer, _PAIR)),
        )

    def _message(self, work: Any) -> Any:
        timeout = self._communicator.timeout
        return work if timeout is None else _Message(work, timeout)

    def _messages(self, *works: Any) -> _Messages:
        return _Messages(list(map(self._message, works)))

    def _start(self, name: str, tensor: torch.Tensor, operation: Callable[[Any], Any]) -> Ticket:
        if self.size == 1:
            return Ticket(self._communicator, None)
        self.calls[name] += 1
        self.sent_bytes[name] += tensor.nbytes
        return self._communicator.start(name, self._over, operation)


def single(axes: Sequence[str] = ("tp",), device: torch.device | None = None) -> Group:
    """A group of one, for layers used by themselves."""
    return Group(axes=axes, communicator=Communicator((0,), None), rank=0, device=device or torch.device("cpu"))


class StoreClients:
    """This process's connections to the store in which cells meet, kept for all generations.

    Each group that is being formed needs its own, since a client is blocked as long as one thread waits in it. New ones
    can be slow: torch.distributed looks up the peer's name for every connection.
    """

    def __init__(self, store: dist.Store) -> None:
        self.first = store
        self._clients = [store]

    def take(self, number: int) -> list[dist.Store]:
        """``number`` clients, none of them twice."""
        while len(self._clients) < number:
            self._clients.append(self.first.clone())
        return self._clients[:number]


@dataclass(kw_only=True)
class Groups:
    """All groups that one cell is a member of. ``generation`` is that of the communicators behind them.

    The Group objects stay what they are when ``renew`` connects them anew: whoever holds one needs no other.
    """

    layout: Layout
    cell: Cell
    generation: int
    device: torch.device
    by_axes: dict[tuple[str, ...], Group]

    @property
    def tp(self) -> Group:
        return self.by_axes["tp",]

    @property
    def dp(self) -> Group:
        return self.by_axes["dp",]

    @property
    def pp(self) -> Group:
        return self.by_axes["pp",]

    @property
    def model(self) -> Group:
        """The cells that together hold one replica of the model."""
        return self.by_axes["tp", "pp"]

    @property
    def world(self) -> Group:
        return self.by_axes["tp", "cp", "dp", "pp"]

    @property
    def waited_s(self) -> float:
        """Seconds that this process has been blocked in waits of any group."""
        return sum(communicator.waited_s for communicator in {group._communicator for group in self.by_axes.values()})

    @classmethod
    def form(
        cls,
        *,
        layout: Layout,
        rank: int,
        generation: int,
        run: str,
        store: StoreClients | None,
        device: torch.device,
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        connect_s: float = CONNECT_S,
        is_aborted: Callable[[], bool] = bool,
    ) -> Groups:
        """Connect every group of ``rank``, different ones at the same time.

        Run and generation are part of every key in ``store``, which may be None if the layout has one cell.
        ``address`` is where this process listens. Nobody connects before all are here, for ``timeout_s`` at most; a
        connection must then come about within ``connect_s``. Raises CollectiveError, also when ``is_aborted`` says so
        while others are awaited.
        """
        groups = cls.unconnected(layout=layout, rank=rank, device=device)
        groups.renew(
            generation=generation,
            run=run,
            store=store,
            address=address,
            timeout_s=timeout_s,
            connect_s=connect_s,
            is_aborted=is_aborted,
        )
        return groups

    @classmethod
    def unconnected(cls, *, layout: Layout, rank: int, device: torch.device) -> Groups:
        """The groups of ``rank`` of generation 0: something can be built with them, but not used before ``renew``."""
        return cls(
            layout=layout,
            cell=layout.cell(rank),
            generation=0,
            device=device,
            by_axes={
                axes: Group(axes=axes, communicator=Communicator(ranks, None), rank=ranks.index(rank), device=device)
                for axes, ranks in _memberships(layout, rank).items()
            },
        )

    def renew(
        self,
        *,
        generation: int,
        run: str,
        store: StoreClients | None,
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        connect_s: float = CONNECT_S,
        is_aborted: Callable[[], bool] = bool,
    ) -> None:
        """Connect the same groups as those of ``generation``, as ``form`` does; what was there is let go."""
        self.abort()
        rank = self.layout.rank(self.cell)
        memberships = _memberships(self.layout, rank)
        members = sorted(set(memberships.values()), key=len)
        num_alone = sum(len(ranks) == 1 for ranks in members)
        assert num_alone == len(members) or store is not None, "several cells need a store to meet in"
        clients = [None] * num_alone + (store.take(len(members) - num_alone) if store is not None else [])
        space = f"{run}/g{generation}"
        if store is not None and self.layout.world > 1:
            _meet(store.first, f"{space}/here", self.layout.world, timeout_s=timeout_s, is_aborted=is_aborted)

        def connect(ranks: tuple[int, ...], client: dist.Store | None) -> Communicator:
            if client is None:
                return Communicator(ranks, None)
            keys = dist.PrefixStore(f"{space}/{'-'.join(map(str, ranks))}", client)
            backend = _backend(keys, ranks.index(rank), len(ranks), self.device, address, timeout_s, connect_s)
            timeout = timedelta(seconds=timeout_s) if self.device.type == "cpu" else None
            return Communicator(ranks, backend, timeout=timeout)

        with ThreadPoolExecutor(max_workers=len(members)) as pool:
            try:
                communicators = dict(zip(members, pool.map(connect, members, clients)))
            except RuntimeError as error:
                raise CollectiveError(
                    f"the groups of generation {generation} could not form within {connect_s:g} s: {error}"
                ) from error
        self.generation = generation
        for axes, group in self.by_axes.items():
            group._communicator = communicators[memberships[axes]]
        if is_aborted():
            self.abort()
            raise CollectiveError(f"generation {generation} was aborted while its groups formed")

    def abort(self) -> None:
        """Let every group go, each in its own thread; callable from any thread, at any time, more than once."""
        _in_threads({group._communicator.abort for group in self.by_axes.values()})

    def close(self) -> None:
        """Let every group go after the last operation; leaves no socket, thread or memory behind."""
        self.abort()


def _memberships(layout: Layout, rank: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {axes: layout.group_of(rank, *axes) for axes in GROUP_AXES}


def _meet(store: dist.Store, key: str, world: int, *, timeout_s: float, is_aborted: Callable[[], bool]) -> None:
    """Return when ``world`` processes have come to ``key``. A connection that waits for one can't be called back."""
    until, pause_s = time.monotonic() + timeout_s, 0.001
    here = store.add(key, 1)
    while here < world:
        if is_aborted() or time.monotonic() > until:
            raise CollectiveError(f"only {here} of {world} cells came to {key}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
        here = store.add(key, 0)


def _in_threads(calls: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _backend(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    address: str,
    timeout_s: float,
    connect_s: float,
) -> Any:
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        store.set_timeout(timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    store.set_timeout(timedelta(seconds=connect_s))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=connect_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend.set_timeout(timeout)
    return backend
