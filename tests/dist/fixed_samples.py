"""What tests let the cells of a layout do from given weights on given samples."""

from dataclasses import replace

import numpy as np
import torch
from cells import advance, open_cell

from rayformer.cell.step import StepRunner
from rayformer.shards import flat_pieces, whole


class FixedSamples:
    """Stands in for the training order: the same samples in every step."""

    def __init__(self, tokens, labels):
        self._tokens, self._labels = tokens, labels

    def batch(self, first, count):
        rows = np.arange(first, first + count) % len(self._tokens)
        return self._tokens[rows], self._labels[rows]


def set_weights(cell, weights):
    """Give the cell its part of whole ``weights``, as from a checkpoint."""
    for shard in cell.optimizer.owned_state():
        name, _, kind = shard.tensor.rpartition("@")
        if kind == "master":
            value = weights[name][shard.box.slices(whole(weights[name].shape))]
            shard.value.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    cell.optimizer.start_gather()
    cell.optimizer.await_parameters()


def own_gradients(cell, runner, valid_tokens):
    """The own part of the mean gradient, as (name, shape, box, values); between a step's begin and finish."""
    tp, plan = cell.groups.tp, cell.parameters.plan
    parts = []
    for bucket, shard in zip(plan.owned, runner.shards):
        lo, hi = plan.shard(bucket, cell.groups.dp.rank)
        for slot in bucket.slots:
            spec, start, stop = cell.specs[slot.name], max(lo, slot.start), min(hi, slot.stop)
            if start < stop and (spec.split is not None or tp.rank == 0):
                for piece in flat_pieces(spec.boxes(tp.size, tp.rank), start - slot.start, stop - slot.start):
                    at = slot.start - lo
                    value = shard[at + piece.start : at + piece.stop].view(piece.box.shape)
                    parts.append((slot.name, spec.shape, piece.box, value.numpy() / valid_tokens))
    return parts


def own_masters(cell):
    """The own part of the master weights, in the same form."""
    masters = [shard for shard in cell.optimizer.unique_state() if shard.tensor.endswith("@master")]
    names = [shard.tensor.removesuffix("@master") for shard in masters]
    return [(name, cell.specs[name].shape, s.box, s.value.numpy().copy()) for name, s in zip(names, masters)]


def train_given(member, tree, weights, tokens, labels, steps=1):
    """A task: train on the given samples. The curve, and own parts of the first gradient and of the last weights."""
    with open_cell(member, tree) as built:
        cell = replace(built, training=FixedSamples(tokens, labels))
        set_weights(cell, weights)
        runner = StepRunner(cell)
        measured = runner.begin(1, 0)
        gradients = own_gradients(cell, runner, measured.valid_tokens)
        runner.vote(stop=False)
        runner.finish(measured, runner.next_lr())
        curve = [(measured.loss, measured.norm), *advance(cell, steps - 1, done=1, runner=runner)]
        return curve, gradients, own_masters(cell)


def run_given(member, tree, weights, tokens, labels):
    """A task of one stage: the own part of the logits [B, S, V/t] and the loss of every token [B, S]."""
    with open_cell(member, tree) as cell, torch.no_grad():
        set_weights(cell, weights)
        logits = cell.stages[0](torch.from_numpy(tokens))
        return logits.float().numpy(), cell.stages[0].token_losses(logits, torch.from_numpy(labels)).numpy()
