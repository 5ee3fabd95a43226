"""Bytes that a cell holds per parameter, and tokens and operations that its log tells, in every layout."""

import gc

import pytest
import torch
from cells import job_tree, open_cell, the_same_on_all, train_events, world_of

MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 257}
BYTES = {  # of parameters and gradients, and of the optimizer's state
    "fp32": (4 + 4, 4 + 4),  # the parameters are the masters
    "bf16": (2 + 4, 4 + 4 + 4),
    "fp16": (2 + 4, 4 + 4 + 4),
}


def tensor_bytes():
    """Bytes of all tensors that are alive in this process, shared memory counted once."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_held(member, tree):
    """A task: this cell's parameters, the bytes of its flat memory as it tells them, and of all its tensors."""
    gc.collect()
    before = tensor_bytes()
    with open_cell(member, tree) as cell:
        cell.grads.start_step()
        told = cell.parameters.buffer.nbytes + cell.grads.num_buffers * 4 * cell.parameters.plan.numel
        gc.collect()
        parameters = sum(slot.numel for slot in cell.parameters.plan.slots)
        return parameters, told + cell.optimizer.state_bytes, tensor_bytes() - before


@pytest.mark.parametrize("params", BYTES)
@pytest.mark.parametrize(
    ("layout", "zero"),
    [({}, 1), ({"dp": 2}, 1), ({"dp": 2}, 0), ({"dp": 4}, 1), ({"tp": 2, "dp": 2}, 1), ({"pp": 2, "dp": 2}, 1)],
    ids=str,
)
def test_a_cell_holds_the_bytes_per_parameter_of_the_closed_form(run_cells, corpus, layout, zero, params):
    tree = job_tree(corpus, model=MODEL, layout=layout, optim={"zero": zero}, precision={"params": params})
    always, divided = BYTES[params]
    per_parameter = always + divided / (layout.get("dp", 1) if zero else 1)
    for parameters, told, held in run_cells(world_of(tree), bytes_held, tree):
        assert 0 <= held - told < 1024  # the frequencies of rotary positions
        assert 0 <= told / parameters / per_parameter - 1 < 0.05  # padding to 1024 elements


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_tokens_and_operations_in_the_log_are_those_of_the_whole_batch(run_cells, corpus, tmp_path, layout):  # B113
    tree = job_tree(corpus, layout=layout, batch={"global": 4, "virtual_ranks": 2})
    cells = run_cells(world_of(tree), train_events, tree, str(tmp_path), 0, 2)
    names = ("tokens", "valid_tokens", "consumed_samples", "flops_per_token")
    steps = the_same_on_all([[[e[name] for name in names] for e in events if "loss" in e] for events in cells])
    assert steps == [[64, 64, 4, 258_240], [64, 64, 8, 258_240]]
