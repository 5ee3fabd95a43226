"""The pool itself: results by rank, the first cause first, and no hang."""

import os
import time

import pytest
from worker_pool import TaskFailed

from rayformer.layout import Layout


def own_rank(member, offset):
    return member.rank + offset, os.getpid()


def wait_for_a_peer_that_raised(member):
    groups = member.form(Layout(dp=member.world))
    if member.rank == 1:
        raise KeyError("the cause")
    groups.dp.barrier()


def sleep_on(member, rank):
    if member.rank == rank:
        time.sleep(600)


def end_process(member):
    if member.rank == 1:
        os._exit(7)


def test_results_come_by_rank_from_different_processes(run_cells):
    results = run_cells(2, own_rank, 10)
    assert [value for value, _ in results] == [10, 11]
    assert len({pid for _, pid in results} | {os.getpid()}) == 3


def test_first_cause_comes_before_its_consequences(run_cells):
    with pytest.raises(TaskFailed, match=r"failed on 2 of 2 workers\n--- rank 1 of 2: (.*\n)*KeyError: 'the cause'"):
        run_cells(2, wait_for_a_peer_that_raised)


def test_hung_worker_is_killed_with_its_stack_and_replaced(run_cells):
    with pytest.raises(TaskFailed, match=r"sleep_on-\d+ failed on 1 of 2 workers\n--- rank 1 (.*\n)*.*in sleep_on"):
        run_cells(2, sleep_on, 1, deadline_s=1.0)
    assert [value for value, _ in run_cells(2, own_rank, 0)] == [0, 1]


def test_worker_that_dies_is_named_and_replaced(run_cells):
    with pytest.raises(TaskFailed, match="rank 1 of 2: its process ended with status 7"):
        run_cells(2, end_process)
    assert [value for value, _ in run_cells(2, own_rank, 0)] == [0, 1]
