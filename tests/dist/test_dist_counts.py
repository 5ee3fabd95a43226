"""Bytes held and sent are those of the closed forms, counted on real runs."""

import json
from collections import Counter
from functools import cache
from math import floor, log2

import pytest
from cells import MODEL, SMALL_BUCKETS, advance, job_tree, open_cell, world_of

from rayformer.cell.step import StepRunner

HIDDEN, SEQ, FLOAT, DOUBLE = 32, 16, 4, 8
LAYER = 64 * 32 + 32 * 32 + 96 * 32 + 32 * 48  # its matrices, which tp divides
NORMS = 2 * 32


def sizes_and_traffic(member, tree):
    """What this cell holds, and what it sent over each group in one step: calls and bytes by operation."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        runner = StepRunner(cell)
        groups = {"-".join(axes): group for axes, group in cell.groups.by_axes.items()}
        for group in groups.values():
            group.calls.clear()
            group.sent_bytes.clear()
        advance(cell, 1, runner=runner)
        plan = cell.parameters.plan
        return {
            "parameters": sum(slot.numel for slot in plan.slots),
            "slots": len(plan.slots),
            "buckets": [bucket.stop - bucket.start for bucket in plan.buckets],
            "parameter_bytes": cell.parameters.buffer.nbytes,
            "state_bytes": cell.optimizer.state_bytes,
            "gradient_buffers": cell.grads.num_buffers,
            "traffic": {
                axes: {name: (group.calls[name], group.sent_bytes[name]) for name in group.calls}
                for axes, group in groups.items()
            },
        }


CASES = [
    ({}, 2, 0),
    ({}, 2, 1),
    ({"dp": 2}, 2, 1),
    ({"dp": 4}, 2, 0),
    ({"dp": 4}, 1, 1),
    ({"tp": 2}, 4, 1),
    ({"pp": 4}, 2, 1),
    ({"dp": 2, "pp": 2, "stages": "Ett|ttL"}, 2, 1),
    ({"tp": 2, "pp": 2, "dp": 2, "stages": "Ett|ttL"}, 2, 1),
]


@pytest.fixture(scope="module")
def measured(run_cells, corpus):
    """``measured(layout, micro, zero)``: sizes and traffic of one step, by rank, each run once."""

    @cache
    def run(tree):
        tree = json.loads(tree)
        return run_cells(world_of(tree), sizes_and_traffic, tree)

    return lambda layout, micro, zero: run(
        json.dumps(job_tree(corpus, layout=layout, batch={"micro": micro}, optim={"zero": zero}))
    )


def expected_parameters(layout, pp_rank, tp_rank):
    """The parameters of one cell of F-M1."""
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    vocab = 257 // tp + (tp_rank < 257 % tp)
    numel = MODEL["layers"] // pp * (LAYER // tp + NORMS)
    numel += vocab * HIDDEN if pp_rank == 0 else 0
    return numel + (vocab * HIDDEN + HIDDEN if pp_rank == pp - 1 else 0)


def coordinates(rank, layout):
    """(tp, dp, pp) of a rank, tp fastest."""
    tp, dp = layout.get("tp", 1), layout.get("dp", 1)
    return rank % tp, rank // tp % dp, rank // (tp * dp)


@pytest.mark.parametrize(("layout", "micro", "zero"), CASES, ids=str)
def test_cells_hold_their_share_and_nothing_more(measured, layout, micro, zero):
    dp = layout.get("dp", 1)
    for rank, cell in enumerate(measured(layout, micro, zero)):
        tp_rank, _, pp_rank = coordinates(rank, layout)
        assert cell["parameters"] == expected_parameters(layout, pp_rank, tp_rank)
        padded = cell["parameter_bytes"] // FLOAT
        assert padded == sum(cell["buckets"]) and all(bucket % (1024 * dp) == 0 for bucket in cell["buckets"])
        assert 0 <= padded - cell["parameters"] <= 1024 * (cell["slots"] + dp * len(cell["buckets"]))
        assert cell["state_bytes"] == 2 * FLOAT * padded // (dp if zero else 1)
        assert cell["gradient_buffers"] == 1
    if not layout:
        assert cell["parameters"] == 47456


@pytest.mark.parametrize(("layout", "micro", "zero"), CASES, ids=str)
def test_one_step_sends_what_the_closed_forms_say(measured, layout, micro, zero):
    tp, pp, dp = (layout.get(axis, 1) for axis in ("tp", "pp", "dp"))
    microbatches = 8 // micro // dp
    activation = micro * SEQ * HIDDEN * FLOAT
    for rank, cell in enumerate(measured(layout, micro, zero)):
        _, _, pp_rank = coordinates(rank, layout)
        first, last = pp_rank == 0, pp_rank == pp - 1
        layers = MODEL["layers"] // pp
        expected = {axes: {} for axes in cell["traffic"]}
        if tp > 1:
            # two forward and two backward per layer, one for the embedding, one behind the output layer
            wide = 4 * layers + first + last
            expected["tp"]["all_reduce"] = (microbatches * wide, microbatches * wide * activation)
            if last:  # the loss: every token's normaliser, its label's share of it, and who has the label
                expected["tp"]["all_gather"] = (microbatches, microbatches * 3 * micro * SEQ * FLOAT)
        if pp > 1:
            messages = microbatches * ((not last) + (not first))
            expected["pp"]["send"] = (messages, messages * activation)
            messages = microbatches * ((not first) + (not last))
            expected["pp"]["recv"] = (messages, messages * activation)
        if dp > 1:
            flat = sum(cell["buckets"])
            expected["dp"]["all_to_all"] = (len(cell["buckets"]), flat * FLOAT)
            # every bucket's shard, and once the sums of 1024-element blocks with every microbatch's loss and tokens
            blocks = flat // 1024 // dp
            expected["dp"]["all_gather"] = (
                len(cell["buckets"]) + 1,
                flat // dp * FLOAT + (blocks + 2 * microbatches) * DOUBLE,
            )
        if tp * pp > 1:
            # the squares of as many parameters as the largest stage has, and every microbatch's loss and tokens
            most = 6 * layers + (3 if pp == 1 else 2)
            expected["tp-pp"]["all_gather"] = (1, (most + 2 * (8 // micro)) * DOUBLE)
        if tp * pp * dp > 1:
            expected["tp-cp-dp-pp"]["all_reduce"] = (1, 3 * DOUBLE)  # the vote
        assert cell["traffic"] == expected, f"rank {rank}"


def gradient_buffers(member, trees):
    """The number of gradient buffers that the job needed, for each job."""
    found = []
    for i, tree in enumerate(trees):
        with open_cell(member, tree, generation=i + 1) as cell:
            advance(cell, 2)
            found.append((len(cell.leaves), cell.grads.num_buffers))
    return found


def test_virtual_ranks_need_a_logarithm_of_gradient_buffers(run_cells, corpus):
    trees = [job_tree(corpus, batch={"global": n, "virtual_ranks": n}) for n in range(1, 9)]
    (alone,) = run_cells(1, gradient_buffers, trees)
    assert [leaves for leaves, _ in alone] == list(range(1, 9))
    trees = [job_tree(corpus, layout={"dp": 3}, batch={"global": n, "virtual_ranks": n}) for n in (3, 7, 8)]
    shared = [pair for cell in run_cells(3, gradient_buffers, trees) for pair in cell]
    assert Counter(leaves for leaves, _ in shared) == {1: 3, 2: 3, 3: 3}
    for leaves, buffers in alone:
        assert buffers <= floor(log2(leaves)) + 1, f"{leaves} virtual ranks"
    for leaves, buffers in shared:  # a run that starts inside a subtree keeps the pieces before its middle apart
        assert buffers <= 2 * floor(log2(leaves)) + 1, f"{leaves} virtual ranks"
