"""Token losses over a vocabulary that tp divides.

Shapes: B batch, S sequence, V vocabulary, V/t the own part of it, t members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from rayformer.groups import Group
from rayformer.ops.compiler import not_compiled


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, start: int, tp: Group) -> torch.Tensor:
    """The loss of every token [B, S] in float32, from the own logits [B, S, V/t] of ids ``start`` and up.

    Each member normalises its own part of the vocabulary; one exchange of three numbers a token corrects that for the
    whole. Labels below 0 have loss 0 and no gradient. Source: Megatron-LM, https://arxiv.org/abs/1909.08053
    """
    if tp.size == 1:  # torch's own kernel is the faster one
        flat = functional.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten().clamp(min=-1), ignore_index=-1, reduction="none"
        )
        return flat.view(labels.shape)
    losses: torch.Tensor = not_compiled(_CrossEntropy.apply, logits, labels, start, tp)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, start: int, tp: Group) -> torch.Tensor:
        own = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # over the own part
        local = labels - start
        owned = (local >= 0) & (local < logits.shape[-1])
        index = torch.where(owned, local, 0).unsqueeze(-1)
        label = own.gather(-1, index).squeeze(-1)
        # The loss is the whole's normaliser less the part's, less the label's logarithm within its part.
        largest, place = own.max(dim=-1)
        normaliser = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).float() - largest
        everybody = label.new_empty(tp.size, 3, *label.shape)
        tp.all_gather(everybody.view(-1), torch.stack([normaliser, label, owned.float()]).view(-1)).wait()
        normalisers, label_parts, owners = everybody.unbind(1)
        total = torch.logsumexp(normalisers, dim=0)
        excess = total - normaliser
        losses = (owners * (total - normalisers - label_parts)).sum(0)
        valid = labels >= 0
        ctx.dtype = logits.dtype
        ctx.save_for_backward(own, excess, index, owned, valid)
        return torch.where(valid, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own, excess, index, owned, valid = ctx.saved_tensors
        grad = torch.where(valid, grad, 0.0)
        d_logits = own.exp().mul_((grad * (-excess).exp()).unsqueeze(-1))
        d_logits.scatter_add_(-1, index, (-grad * owned).unsqueeze(-1))
        return d_logits.to(ctx.dtype), None, None, None
