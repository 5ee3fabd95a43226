"""Every family of models, with dropout and uneven masks, has one curve for every layout.

The bits do not depend on dp, pp, schedule, zero, overlap and recomputation, in fp32 and in bf16; tp agrees to rounding.
"""

import numpy as np
import pytest
import torch
from cells import advance, assembled, job_tree, open_cell, the_same_on_all, train_curve, world_of
from fixed_samples import own_gradients, own_masters

from rayformer.cell.step import StepRunner
from rayformer.shards import flat_pieces, whole
from rayformer.stages.tape import Tape

LLAMA = {"layers": 5, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 257, "dropout": 0.1}
GPT2 = {
    **LLAMA,
    "kv_heads": None,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "max_positions": 16,
    "bias": True,
    "tie_embeddings": True,
    "attention_dropout": 0.1,
}
FAMILIES = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 12},
    "gpt2": GPT2,
}
COMPILED = {"layers": 2, "compile": True}
FULL = {"mode": "full"}
BLOCK = {"mode": "full", "method": "block", "layers": 2}
SELECTIVE = {"mode": "selective", "modules": ["core_attn", "mlp", "act", "norm"]}
SPLIT_SEQUENCE = {"tp": 2, "sequence_parallel": True}
ONE_MICROBATCH = {"micro": 4, "virtual_ranks": 1}
TWO_MICROBATCHES = {"micro": 2, "virtual_ranks": 2}


def job(corpus, family, *, params="fp32", model=None, batch=None, **options):
    """A job of a family: 4 samples a step as 4 microbatches in 4 virtual ranks, most small token ids without loss."""
    return job_tree(
        corpus,
        model={**FAMILIES[family], **(model or {})},
        batch={"global": 4, "micro": 1, "virtual_ranks": 4, **(batch or {})},
        data={"train": [{"path": corpus}], "split": [3.0, 1.0, 0.0], "ignore_ids": list(range(120))},
        precision={"params": params},
        **options,
    )


def labels_of_samples(member, tree, count):
    """A task: how many labels each of the first samples has."""
    with open_cell(member, tree) as cell:
        return (cell.training.batch(0, count)[1] >= 0).sum(axis=1).tolist()


def test_samples_have_different_numbers_of_labels(run_cells, corpus):
    (counts,) = run_cells(1, labels_of_samples, job(corpus, "llama"), 16)
    assert all(len(set(counts[first : first + 4])) > 1 for first in range(0, 16, 4))
    assert 0 < min(counts) < max(counts) / 4


@pytest.mark.parametrize(
    ("family", "share"), [*((family, "dropout") for family in FAMILIES), ("gpt2", "attention_dropout")]
)
def test_dropout_changes_the_loss(reference, corpus, family, share):
    ((dropping, _),), _ = reference(job(corpus, family), 1)
    ((keeping, _),), _ = reference(job(corpus, family, model={share: 0.0}), 1)
    assert abs(dropping / keeping - 1) > 1e-5


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ("fp32", {"layout": {"dp": 2}}),
        ("fp32", {"layout": {"dp": 2}, "optim": {"zero": 0}}),
        ("fp32", {"layout": {"pp": 2}}),
        ("fp32", {"layout": {"pp": 3}, "schedule": "gpipe"}),
        ("fp32", {"layout": {"dp": 2, "pp": 2}, "optim": {"overlap": True}}),
        ("fp32", {"layout": {"pp": 2}, "recompute": FULL}),
        ("fp32", {"layout": {"pp": 2}, "recompute": BLOCK}),
        ("fp32", {"layout": {"pp": 2}, "recompute": SELECTIVE}),
        ("bf16", {"layout": {"dp": 2}, "optim": {"zero": 0}}),
        ("bf16", {"layout": {"pp": 3}, "schedule": "gpipe", "recompute": FULL}),
        ("bf16", {"layout": {"dp": 2, "pp": 2}, "optim": {"overlap": True}, "recompute": BLOCK}),
        ("bf16", {"layout": {"pp": 2}, "recompute": SELECTIVE}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_dp_pp_schedule_zero_or_recomputation(
    run_cells, reference, corpus, family, params, options
):
    tree = job(corpus, family, params=params, **options)
    found = the_same_on_all(run_cells(world_of(tree), train_curve, tree, 4))
    assert found == reference(job(corpus, family, params=params), 4)


@pytest.fixture(scope="module")
def compiled(run_cells, corpus):
    """The curve of a compiled model in one process."""
    tree = job(corpus, "llama", model=COMPILED)
    return the_same_on_all(run_cells(1, train_curve, tree, 2))


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_bits_of_a_compiled_model_do_not_depend_on_the_layout(run_cells, corpus, compiled, layout):
    tree = job(corpus, "llama", model=COMPILED, layout=layout)
    assert the_same_on_all(run_cells(world_of(tree), train_curve, tree, 2)) == compiled


def test_a_compiled_model_follows_the_curve_of_torchs_kernels_to_rounding(reference, corpus, compiled):
    plain, _ = reference(job(corpus, "llama", model={"layers": 2}), 2)
    assert max(deviations(compiled[0], plain)) < 1e-5


def deviations(curve, expected):
    """The largest relative deviation of the losses, and of the norms."""
    return [max(abs(a / b - 1) for a, b in zip(*column)) for column in zip(zip(*curve), zip(*expected))]


@pytest.mark.parametrize("layout", [{"tp": 2}, SPLIT_SEQUENCE, {**SPLIT_SEQUENCE, "pp": 2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_curve_is_that_of_one_process_to_rounding(run_cells, reference, corpus, family, layout):
    batch = TWO_MICROBATCHES if "pp" in layout else ONE_MICROBATCH
    tree = job(corpus, family, layout=layout, batch=batch)
    curve, _ = the_same_on_all(run_cells(world_of(tree), train_curve, tree, 6))
    expected, _ = reference(job(corpus, family, batch=TWO_MICROBATCHES), 6)
    assert max(deviations(curve, expected)) < 1e-5


@pytest.mark.parametrize("layout", [{"tp": 2}, {**SPLIT_SEQUENCE, "pp": 2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_curve_in_bf16_is_that_of_one_process_to_rounding(run_cells, reference, corpus, family, layout):
    tree = job(corpus, family, params="bf16", layout=layout, batch=TWO_MICROBATCHES)
    curve, _ = the_same_on_all(run_cells(world_of(tree), train_curve, tree, 3))
    losses, norms = deviations(curve, reference(job(corpus, family, params="bf16"), 4)[0][:3])
    assert 0 < losses < 2e-3 and norms < 2e-2


def train_tables(member, tree, steps):
    """A task: the token tables that this cell computes with, own and borrowed, before and after training."""
    with open_cell(member, tree) as cell:
        tables = [parameter for parameter in cell.stages[0].parameters() if parameter.spec.tied]
        before = [table.detach().float().numpy().copy() for table in tables]
        advance(cell, steps)
        return before, [table.detach().float().numpy().copy() for table in tables]


@pytest.mark.parametrize(
    ("family", "params", "layout"),
    [
        ("qwen2", "fp32", {"dp": 2, "pp": 2}),
        ("qwen2", "bf16", {"tp": 2, "pp": 2}),
        ("gpt2", "fp32", {"pp": 2}),
        ("gpt2", "bf16", {"pp": 3}),
    ],
    ids=str,
)
def test_tied_tables_of_first_and_last_stage_stay_equal(run_cells, corpus, family, params, layout):
    model = {"layers": layout["pp"]}
    batch = {"global": 2, "virtual_ranks": 2} if "tp" not in layout else {"global": 1, "virtual_ranks": 1}
    tree = job(corpus, family, params=params, layout=layout, model=model, batch=batch)
    cells = run_cells(world_of(tree), train_tables, tree, 50)
    replica = len(cells) // layout["pp"]
    for (before, after), (_, last) in zip(cells[:replica], cells[-replica:]):
        assert np.abs(after[0] - last[0]).max() == 0
        assert np.abs(after[0] - before[0]).max() > 1e-3
    assert all(not after for _, after in cells[replica:-replica])


def masters_and_parameters(member, tree, steps):
    """A task: own parts of the masters, and all that this cell computes with, as (name, box, values)."""
    with open_cell(member, tree) as cell:
        advance(cell, steps)
        tp, parts = cell.groups.tp, []
        for parameter in cell.stages[0].parameters():
            flat, boxes = parameter.detach().view(-1), parameter.spec.boxes(tp.size, tp.rank)
            for piece in flat_pieces(boxes, 0, flat.numel()):
                value = flat[piece.start : piece.stop].view(piece.box.shape)
                parts.append((parameter.spec.name, piece.box, value.float().numpy()))
        return own_masters(cell), parts


@pytest.mark.parametrize(
    ("params", "family", "layout", "zero"),
    [
        ("bf16", "llama", {}, 1),
        ("bf16", "qwen2", {"dp": 2, "pp": 2}, 1),
        ("bf16", "qwen3", {"dp": 2}, 0),
        ("bf16", "gpt2", SPLIT_SEQUENCE, 1),
        ("fp16", "gpt2", {"dp": 2, "pp": 2}, 1),
    ],
    ids=str,
)
def test_sixteen_bit_parameters_are_the_cast_of_their_masters(run_cells, corpus, params, family, layout, zero):
    tree = job(corpus, family, params=params, layout=layout, batch={"virtual_ranks": 2}, optim={"zero": zero})
    cells = run_cells(world_of(tree), masters_and_parameters, tree, 2)
    masters = assembled([part for part, _ in cells])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[params]
    cast = {name: torch.from_numpy(value).to(dtype).float().numpy() for name, value in masters.items()}
    assert all((cast[name] != value).mean() > 0.5 for name, value in masters.items() if value.ndim > 1)
    seen = set()
    for _, parts in cells:
        for name, box, value in parts:
            np.testing.assert_array_equal(value, cast[name][box.slices(whole(cast[name].shape))], err_msg=name)
            seen.add(name)
    assert seen == masters.keys()


def test_sixteen_bit_runs_start_from_the_same_masters(reference, corpus):
    hashes = {reference(job(corpus, "gpt2", params=params), 0)[1] for params in ("fp32", "bf16", "fp16")}
    assert len(hashes) == 1


MODES = [FULL, {"mode": "full", "layers": 2}, BLOCK, SELECTIVE]
SINGLE = [{"mode": "selective", "modules": [module]} for module in SELECTIVE["modules"]]


def second_gradients(member, trees):
    """A task: of each job loss, norm and own gradients of the second step."""
    found = []
    for i, tree in enumerate(trees):
        with open_cell(member, tree, generation=i + 1) as cell:
            runner = StepRunner(cell)
            advance(cell, 1, runner=runner)
            measured = runner.begin(2, tree["batch"]["global"])
            gradients = [value.copy() for _, _, _, value in own_gradients(cell, runner, 1)]
            found.append((measured.loss, measured.norm, gradients))
    return found


@pytest.mark.parametrize(
    ("layout", "schedule", "modes"),
    [
        ({}, "1f1b", [*MODES, *SINGLE]),
        ({"pp": 2}, "gpipe", MODES),
        ({"tp": 2}, "1f1b", MODES),
        ({**SPLIT_SEQUENCE, "pp": 2}, "1f1b", [FULL, SELECTIVE]),
    ],
    ids=["one process", "pp 2, four in flight", "tp 2", "tp 2 with the sequence, pp 2"],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputation_drops_the_same_and_gives_the_same_gradients(
    run_cells, corpus, family, layout, schedule, modes
):  # B35
    batch = TWO_MICROBATCHES if "tp" in layout else {}
    options = {"model": {"layers": 3}, "layout": layout, "schedule": schedule, "batch": batch}
    trees = [job(corpus, family, recompute=mode, **options) for mode in [{"mode": "none"}, *modes]]
    for expected, *others in run_cells(world_of(trees[0]), second_gradients, trees):
        for mode, found in zip(modes, others, strict=True):
            assert found[:2] == expected[:2], mode
            assert all(np.array_equal(a, b) for a, b in zip(found[2], expected[2], strict=True)), mode


def kept_bytes(member, trees):
    """A task of one process: of each job the bytes that forward of one microbatch keeps for backward."""
    found = []
    for i, tree in enumerate(trees):
        with open_cell(member, tree, generation=i + 1) as cell:
            kept = {}

            def keep(tensor, kept=kept):
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            tokens, labels = map(torch.from_numpy, cell.training.batch(0, 1))
            tape = Tape(cell.stages[0], step=1, samples=(0,), labels=labels)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                tape.forward(tokens, 0, len(cell.stages[0].segments))
            kept.pop(cell.parameters.buffer.untyped_storage().data_ptr(), None)
            found.append(sum(kept.values()))
    return found


# Fused attention keeps no probabilities to forget, and gelu keeps its input alone.
@pytest.mark.parametrize(("family", "nothing_to_forget"), [("llama", "core_attn"), ("gpt2", "act")])
def test_recomputation_keeps_less(run_cells, corpus, family, nothing_to_forget):
    modes = [*MODES, *(mode for mode in SINGLE if mode["modules"] != [nothing_to_forget])]
    trees = [job(corpus, family, recompute=mode) for mode in [{"mode": "none"}, *modes]]
    ((everything, *kept),) = run_cells(1, kept_bytes, trees)
    for mode, some in zip(modes, kept, strict=True):
        assert 0 < some < everything, mode
    assert kept[0] < 0.2 * everything
