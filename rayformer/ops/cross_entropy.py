"""Token losses over a vocabulary that tp divides.

Shapes: B batch, S sequence, V vocabulary, V/t the own part of it.
"""

from __future__ import annotations

from typing import Any

import torch

from rayformer.groups import Group


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, start: int, tp: Group) -> torch.Tensor:
    """The loss of every token [B, S] in float32, from the own logits [B, S, V/t] of ids ``start`` and up.

    loss = ln(sum exp(z - max)) - (z_label - max), with the maximum and both sums taken over the group. Labels below 0
    have loss 0 and no gradient. Source: Megatron-LM, https://arxiv.org/abs/1909.08053
    """
    return _CrossEntropy.apply(logits, labels, start, tp)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, start: int, tp: Group) -> torch.Tensor:
        logits = logits.float()
        largest = logits.max(dim=-1).values
        tp.all_reduce(largest, "max").wait()
        shifted = logits - largest.unsqueeze(-1)
        local = labels - start
        owned = (local >= 0) & (local < logits.shape[-1])
        index = torch.where(owned, local, 0).unsqueeze(-1)
        exp = shifted.exp()
        sums = torch.stack([exp.sum(dim=-1), torch.where(owned, shifted.gather(-1, index).squeeze(-1), 0.0)])
        tp.all_reduce(sums).wait()
        total, predicted = sums
        valid = labels >= 0
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), index, owned, valid)
        return torch.where(valid, total.log() - predicted, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, index, owned, valid = ctx.saved_tensors
        d_logits = probabilities.scatter_add(-1, index, -owned.unsqueeze(-1).to(probabilities.dtype))
        return d_logits.mul_(torch.where(valid, grad, 0.0).unsqueeze(-1)), None, None, None
