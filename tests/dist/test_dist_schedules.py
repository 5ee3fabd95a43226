"""One set of bits for every pipeline schedule, however many stages a rank holds; and what each holds meanwhile."""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from weakref import finalize

import pytest
import torch
from cells import SMALL_BUCKETS, advance, job_tree, open_cell, the_same_on_all, train_curve, world_of

from rayformer.cell.state import load_checkpoint, save_checkpoint, state_hash
from rayformer.cell.step import StepRunner
from rayformer.ckpt.manifest import step_folder
from rayformer.stages.check import check
from rayformer.stages.lowering import lower
from rayformer.stages.schedules import SCHEDULES, get_schedule
from rayformer.stages.tape import Tape

MODEL = {"layers": 9}  # not divisible by any pp, and enough for 4 ranks of 2 stages
VIRTUAL = {"interleaved": [1, 2], "zbv": [2]}
CASES = [(name, chunks) for name in SCHEDULES for chunks in VIRTUAL.get(name, [1])]


def tree_of(corpus, pp, name="1f1b", chunks=1, *, layout=None, **options):
    layout = {"pp": pp, "virtual_stages": chunks, **(layout or {})}
    return job_tree(corpus, layout=layout, schedule=name, **{"model": MODEL, **options})


@pytest.mark.parametrize("microbatches", [2, 4, 6])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_bits_do_not_depend_on_the_schedule_or_the_virtual_stages(
    run_cells, reference, corpus, name, chunks, pp, microbatches
):
    options = {"batch": {"global": microbatches, "virtual_ranks": 2}}
    tree = tree_of(corpus, pp, name, chunks, **options)
    found = the_same_on_all(run_cells(pp, train_curve, tree, 3, SMALL_BUCKETS))
    assert found == reference(tree_of(corpus, 1, **options), 3)


HARD = {
    "tied": {"model": {**MODEL, "tie_embeddings": True}},
    "dropout": {"model": {**MODEL, "dropout": 0.1, "attention_dropout": 0.1}},
    "bf16": {"precision": {"params": "bf16"}},
    "recompute full": {"recompute": {"mode": "full", "layers": 1}},
    "recompute selective": {"recompute": {"mode": "selective", "modules": ["core_attn", "mlp", "norm"]}},
    "layernorm, biases and learned positions": {
        "model": {**MODEL, "norm": "layernorm", "bias": True, "position": "learned", "max_positions": 16}
    },
}


@pytest.mark.parametrize("which", HARD)
@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb_h1", 1), ("zbv", 2)])
def test_bits_are_the_same_for_every_kind_of_layer(run_cells, reference, corpus, name, chunks, which):
    options = {"batch": {"global": 4}, **HARD[which]}
    found = the_same_on_all(run_cells(2, train_curve, tree_of(corpus, 2, name, chunks, **options), 3))
    assert found == reference(tree_of(corpus, 1, **options), 3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb_h1", 1), ("zbv", 2)])
def test_bits_are_the_same_with_tensor_parallel(run_cells, corpus, name, chunks, sequence_parallel):
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    options = {"batch": {"global": 4, "micro": 2}, "layout": layout}
    found = the_same_on_all(run_cells(4, train_curve, tree_of(corpus, 2, name, chunks, **options), 2))
    assert found == the_same_on_all(run_cells(2, train_curve, tree_of(corpus, 1, **options), 2))


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb_h1", 1), ("zbv", 2)])
def test_replicas_with_uneven_shares_reduce_the_same_buckets_in_the_same_order(
    run_cells, reference, corpus, name, chunks, dp
):
    options = {"batch": {"global": 8, "virtual_ranks": 4}, "optim": {"overlap": True}}
    tree = tree_of(corpus, 2, name, chunks, layout={"dp": dp}, **options)
    found = the_same_on_all(run_cells(world_of(tree), train_curve, tree, 3, SMALL_BUCKETS))
    assert found == reference(tree_of(corpus, 1, **options), 3)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_interleaved_runs_any_number_of_microbatches(run_cells, reference, corpus, microbatches):  # B43
    options = {"batch": {"global": microbatches}}
    found = the_same_on_all(run_cells(2, train_curve, tree_of(corpus, 2, "interleaved", 2, **options), 2))
    assert found == reference(tree_of(corpus, 1, **options), 2)


@pytest.mark.parametrize("group", [2, 3, 6])
def test_interleaved_in_groups_of_any_size(run_cells, reference, corpus, group):
    options = {"batch": {"global": 6}}
    tree = tree_of(corpus, 2, "interleaved", 2, **options)
    tree["schedule"]["group"] = group
    assert the_same_on_all(run_cells(2, train_curve, tree, 2)) == reference(tree_of(corpus, 1, **options), 2)


WRITTEN = {
    # 1F1B whose second rank does its weight gradients at the end
    (1, False): "pp0 F0 F1 B0 W0 F2 B1 W1 B2 W2 \n pp1 F0 B0 F1 B1 F2 B2 W0 W1 W2",
    # a V that works through one microbatch at a time
    (2, True): "F0 F0c1 B0c1 W0c1 B0 W0 F1 F1c1 B1c1 W1c1 B1 W1 F2 F2c1 B2c1 W2c1 B2 W2\n" * 2,
}


@pytest.mark.parametrize(("chunks", "vee"), WRITTEN)
def test_a_schedule_written_down_runs(run_cells, reference, corpus, chunks, vee):
    options = {"batch": {"global": 3}}
    tree = tree_of(corpus, 2, "table", chunks, **options)
    tree["schedule"] |= {"table": WRITTEN[chunks, vee], "vee": vee}
    assert the_same_on_all(run_cells(2, train_curve, tree, 2)) == reference(tree_of(corpus, 1, **options), 2)


def save(member, tree, folder, steps):
    """A task: train, and write a checkpoint; its hash."""
    with open_cell(member, tree) as cell:
        advance(cell, steps)
        saved = save_checkpoint(cell, Path(folder), step=steps, consumed_samples=steps * cell.job.batch.global_)
        return saved.state_hash


def go_on(member, tree, folder, done, steps):
    """A task: load, train on, evaluate; the curve, the held-out loss and the hash."""
    with open_cell(member, tree) as cell:
        load_checkpoint(cell, Path(folder) / step_folder(done))
        runner = StepRunner(cell)
        return advance(cell, steps, done=done, runner=runner), runner.evaluate(2), state_hash(cell)


def test_a_checkpoint_goes_on_under_any_schedule_and_its_evaluation_has_the_same_bits(run_cells, corpus, tmp_path):
    options = {"model": {**MODEL, "tie_embeddings": True}, "batch": {"global": 4, "virtual_ranks": 2}}
    trees = [tree_of(corpus, pp, name, chunks, **options) for name, chunks in CASES for pp in (1, 2)]
    found = []
    for number, tree in enumerate(trees):
        folder = str(tmp_path / str(number))
        the_same_on_all(run_cells(world_of(tree), save, tree, folder, 2))
        after = trees[(7 * number + 3) % len(trees)]
        found.append(the_same_on_all(run_cells(world_of(after), go_on, after, folder, 2, 2)))
    assert all(one == found[0] for one in found)
    assert found[0][1] > 0


@contextmanager
def held(live, peak):
    """Count what forwards leave for backwards: ``live`` tensors by place, and into ``peak`` the most places at once."""
    forward = Tape.forward

    def counted(tape, x, first, stop):
        place = (tape._stage, tape._samples)

        def dropped(kept):
            live[place] -= kept
            if not live[place]:
                del live[place]

        class Kept:
            def __init__(self, tensor):
                self.tensor = tensor.detach()  # an output would hold the graph that holds it
                live[place] += 1
                peak[0] = max(peak[0], len(live))
                finalize(self, dropped, 1)

        def pack(tensor):
            return tensor if isinstance(tensor, torch.nn.Parameter) else Kept(tensor)

        def unpack(kept):
            return kept.tensor if isinstance(kept, Kept) else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(tape, x, first, stop)

    Tape.forward = counted
    try:
        yield
    finally:
        Tape.forward = forward


def most_held(member, tree):
    """A task: the most chunks of microbatches whose activations were in memory at once, in the second step."""
    live, peak = Counter(), [0]
    with open_cell(member, tree) as cell:
        runner = StepRunner(cell)
        with held(live, peak):
            for step in (1, 2):
                peak[0] = 0
                runner.finish(runner.begin(step, 0), 1e-3)
                assert not live, "everything is let go at the end of a step"
        cell.optimizer.await_parameters()
    return peak[0]


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_a_rank_holds_as_much_as_check_says(run_cells, corpus, name, chunks, pp, microbatches):
    tree = tree_of(corpus, pp, name, chunks, batch={"global": microbatches})
    schedule = get_schedule(name)
    report = check(lower(schedule(pp, chunks, microbatches), vee=schedule.vee), rendezvous=False, vee=schedule.vee)
    assert run_cells(pp, most_held, tree) == list(report.peak_live)
