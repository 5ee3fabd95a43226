"""Groups: they move what they should, leave nothing behind, and let go of blocked members."""

import os
import threading
import time

import psutil
import pytest
import torch
from worker_pool import TaskFailed

from rayformer.errors import CollectiveError
from rayformer.groups import Groups
from rayformer.layout import Layout

EIGHT = Layout(tp=2, dp=2, pp=2)


def use_every_operation(member):
    """Each operation over each group, with the ranks' own numbers as data."""
    groups = member.form(EIGHT)
    found = {}
    for axes, group in groups.by_axes.items():
        n, own = group.size, torch.tensor([float(member.rank)])
        total, largest, root = own.clone(), own.clone(), own.clone()
        group.all_reduce(total).wait()
        group.all_reduce(largest, "max").wait()
        group.broadcast(root, n - 1).wait()
        everyone = torch.empty(n)
        group.all_gather(everyone, own).wait()
        # member r sends r + 1 copies of its rank to each
        counts = [r + 1 for r in range(n)]
        sent = own.repeat(n * counts[group.rank])
        received = torch.empty(sum(counts))
        group.all_to_all(received, sent, counts, [counts[group.rank]] * n).wait()
        neighbour = torch.empty(1)
        ticket = group.send(own, (group.rank + 1) % n, 5)
        group.recv(neighbour, (group.rank - 1) % n, 5).wait()
        ticket.wait()
        group.barrier()
        found["-".join(axes)] = {
            "ranks": group.ranks,
            "rank": group.rank,
            "all_reduce": total.item(),
            "max": largest.item(),
            "broadcast": root.item(),
            "all_gather": everyone.tolist(),
            "all_to_all": received.tolist(),
            "recv": neighbour.item(),
            "values": group.gather_values({"rank": member.rank, "text": "x" * member.rank}),
        }
    groups.close()
    return found


def test_every_operation_over_every_axis(run_cells):
    for rank, by_axes in enumerate(run_cells(8, use_every_operation)):
        for axes, found in by_axes.items():
            ranks = EIGHT.group_of(rank, *axes.split("-"))
            at = ranks.index(rank)
            assert found == {
                "ranks": ranks,
                "rank": at,
                "all_reduce": sum(ranks),
                "max": max(ranks),
                "broadcast": ranks[-1],
                "all_gather": list(ranks),
                "all_to_all": [r for i, r in enumerate(ranks) for _ in range(i + 1)],
                "recv": ranks[at - 1],
                "values": [{"rank": r, "text": "x" * r} for r in ranks],
            }


def held():
    """The descriptors and threads of this process."""
    process = psutil.Process()
    return process.num_fds(), len(process.net_connections()), process.num_threads()


def form_and_close(member, layout, cycles):
    """Descriptors, sockets and threads before and after so many cycles."""
    found = []
    for cycle in range(cycles + 2):
        if cycle == 2:
            found.append(held())
        groups = member.form(layout, generation=cycle)
        groups.world.barrier()
        if groups.pp.size > 1:
            peer, mine, theirs = 1 - groups.pp.rank, torch.ones(3), torch.empty(3)
            ticket = groups.pp.send(mine, peer, 0)
            groups.pp.recv(theirs, peer, 0).wait()
            ticket.wait()
        groups.close()
        del groups
    found.append(held())
    return found


@pytest.mark.parametrize(("layout", "cycles"), [(Layout(dp=2, pp=2), 50), (Layout(tp=2), 50)], ids=str)
def test_closed_groups_leave_no_descriptor_socket_or_thread(run_cells, layout, cycles):
    for before, after in run_cells(layout.world, form_and_close, layout, cycles):
        assert after == before


def blocked(groups, operation):
    """Start an operation on a group over all members of which one is missing, and wait for it."""
    world = groups.world
    big = torch.zeros(2**20)
    match operation:
        case "all_reduce":
            world.all_reduce(big).wait()
        case "all_gather":
            world.all_gather(torch.empty(world.size * 2**20), big).wait()
        case "all_to_all":
            share = 2**20 // world.size
            world.all_to_all(
                torch.empty(share * world.size), big[: share * world.size], [share] * world.size, [share] * world.size
            ).wait()
        case "recv":
            world.recv(big, (world.rank + 1) % world.size, 0).wait()
        case "send":  # to the member that leaves
            world.send(torch.zeros(2**24), 0, 0).wait()
        case _:
            raise AssertionError(operation)


def leave_others_blocked(member, operation, delay_s):
    """Member 0 aborts while the others are in the operation; what they get, and how they leave in turn."""
    groups = member.form(Layout(dp=member.world))
    groups.world.barrier()
    if member.rank == 0:
        time.sleep(delay_s)
        groups.abort()
        return None
    try:
        blocked(groups, operation)
    except CollectiveError as error:
        groups.abort()  # while the error, and with it the frames it came through, is still alive
        time.sleep(delay_s)
        return str(error)
    raise AssertionError(f"{operation} ended without member 0")


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all", "recv", "send"])
def test_member_that_leaves_makes_blocked_peers_raise(run_cells, operation):
    first, *others = run_cells(4, leave_others_blocked, operation, 0.3, deadline_s=15.0)
    assert first is None
    assert all("group of ranks [0, 1, 2, 3]" in error for error in others)


def leave_along_a_chain(member):
    """Member 0 leaves; each member waits for the one before it alone, and keeps the error that it got."""
    groups = member.form(Layout(dp=member.world))
    groups.world.barrier()
    kept = None
    if member.rank:
        try:
            groups.dp.recv(torch.zeros(4), member.rank - 1, 0).wait()
        except CollectiveError as error:
            kept = error
    groups.abort()
    if member.rank < member.world - 1:
        member.store.first.get(f"{member.task}/last-one-raised")  # so that no end of a process helps
    else:
        member.store.first.set(f"{member.task}/last-one-raised", b"1")
    return type(kept).__name__


def test_error_that_is_kept_does_not_keep_the_next_member_waiting(run_cells):
    results = run_cells(4, leave_along_a_chain, deadline_s=15.0)
    assert results == ["NoneType", "CollectiveError", "CollectiveError", "CollectiveError"]


def abort_from_another_thread(member, operation):
    """All members but the first are in an operation that can't end; a second thread of every member aborts it."""
    groups = member.form(Layout(dp=member.world))
    groups.world.barrier()
    watch = threading.Timer(0.3, groups.abort)
    watch.start()
    try:
        if member.rank == 0 and operation != "recv":
            time.sleep(0.6)
            groups.world.barrier()
        blocked(groups, operation)
    except CollectiveError as error:
        watch.join()
        return str(error)
    raise AssertionError("it ended")


@pytest.mark.parametrize("operation", ["all_reduce", "recv", "all_to_all"])
def test_abort_by_another_thread_ends_every_wait(run_cells, operation):
    for error in run_cells(4, abort_from_another_thread, operation, deadline_s=15.0):
        assert "group of ranks [0, 1, 2, 3]" in error


def abort_at_random_moments(member, rounds):
    """Rounds of collectives and messages in three groups, each ended by an abort on every member at its own moment."""
    raised = 0
    for generation in range(1, rounds + 1):
        groups = member.form(Layout(tp=2, pp=2), generation=generation)
        watch = threading.Timer(0.005 * (generation * 7 + member.rank * 3) % 0.05, groups.abort)
        try:
            groups.world.barrier()  # who passes it knows that all have formed
            watch.start()
            while True:
                ticket = groups.pp.send(torch.zeros(1000), 1 - groups.pp.rank, 0)
                groups.tp.all_reduce(torch.zeros(1000)).wait()
                groups.pp.recv(torch.zeros(1000), 1 - groups.pp.rank, 0).wait()
                groups.world.all_to_all(torch.empty(4000), torch.zeros(4000), [1000] * 4, [1000] * 4).wait()
                ticket.wait()
        except CollectiveError:
            raised += 1
        groups.abort()
        watch.cancel()
    return raised


def test_abort_at_any_moment_ends_every_member(run_cells):
    assert run_cells(4, abort_at_random_moments, 30, deadline_s=30.0) == [30] * 4


def die_in(member, operation):
    """Member 0's process ends while the others are in the operation."""
    groups = member.form(Layout(dp=member.world))
    groups.world.barrier()
    if member.rank == 0:
        os._exit(9)
    blocked(groups, operation)


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_death_of_a_process_makes_its_peers_raise(run_cells, operation):
    with pytest.raises(TaskFailed) as failure:
        run_cells(3, die_in, operation, deadline_s=15.0)
    message = str(failure.value)
    assert "rank 0 of 3: its process ended with status 9" in message
    assert "no answer" not in message and message.count("errors.CollectiveError: group of ranks [0, 1, 2]") == 2


def two_generations(member):
    """What is received in each of two generations that live at the same time, and after the older was aborted."""
    old, new = (member.form(Layout(dp=2), generation=generation) for generation in (1, 2))
    peer = 1 - member.rank
    sends = [groups.dp.send(torch.tensor([groups.generation * 10.0 + member.rank]), peer, 0) for groups in (old, new)]
    received = [torch.empty(1), torch.empty(1)]
    for groups, value in zip((new, old), reversed(received)):
        groups.dp.recv(value, peer, 0).wait()
    for ticket in sends:
        ticket.wait()
    old.abort()
    with pytest.raises(CollectiveError, match="after the group was aborted"):
        old.dp.barrier()
    total = torch.tensor([float(member.rank)])
    new.dp.all_reduce(total).wait()
    new.close()
    return [value.item() for value in received], total.item()


def test_generations_do_not_hear_each_other(run_cells):
    assert run_cells(2, two_generations) == [([11.0, 21.0], 1.0), ([10.0, 20.0], 1.0)]


def form_alone(member):
    """Each member waits for the other in a generation of its own."""
    with pytest.raises(CollectiveError) as error:
        member.form(Layout(dp=2), generation=member.rank + 5, timeout_s=1.0)
    return str(error.value)


def test_members_of_different_generations_never_form_a_group(run_cells):
    messages = run_cells(2, form_alone)
    for rank, message in enumerate(messages):
        assert message.startswith("only 1 of 2 cells came to ") and f"/g{rank + 5}/" in message


def renew_after_abort(member, cycles):
    """The sums over the world in every generation, while one member is late for the abort each time."""
    groups = member.form(EIGHT)
    world, found = groups.world, []
    for generation in range(2, cycles + 2):
        own = torch.tensor([float(member.rank)])
        world.all_reduce(own).wait()
        found.append(own.item())
        if member.rank == generation % 8:
            time.sleep(0.05)
        else:
            threading.Timer(0.1, groups.abort).start()
            with pytest.raises(CollectiveError):
                groups.world.recv(torch.empty(1), (groups.world.rank + 1) % 8, 9).wait()
        groups.abort()
        groups.renew(generation=generation, run=member.task, store=member.store)
        assert groups.world is world and groups.generation == generation
    before = held()
    groups.close()
    return found, before


def test_groups_connect_anew_and_stay_the_objects_that_everybody_holds(run_cells):
    results = run_cells(8, renew_after_abort, 6)
    assert all(found == [28.0] * 6 for found, _ in results)
    assert all(sockets < 60 for _, (_, sockets, _) in results), "connections of old generations are left"


def wait_for_a_member_that_does_not_come(member):
    """How the wait ends for those that came when they are told that the generation is given up."""
    if member.rank == 1:
        return "absent"
    aborted = threading.Event()
    threading.Timer(0.3, aborted.set).start()
    with pytest.raises(CollectiveError) as error:
        Groups.form(
            layout=Layout(dp=2), rank=0, generation=1, run=member.task, store=member.store,
            device=torch.device("cpu"), is_aborted=aborted.is_set,
        )  # fmt: skip
    return str(error.value)


def test_who_waits_for_others_to_form_groups_can_be_called_back(run_cells):
    told, _ = run_cells(2, wait_for_a_member_that_does_not_come)
    assert told.startswith("only 1 of 2 cells came to ")
