"""What a model is made of: blocks, each built only by the cells that hold it, and a loss over the last one's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from rayformer.groups import Group
from rayformer.nn.context import Context

# (output of the last block, labels [B, S], tp) -> the loss of every token [B, S]
TokenLoss = Callable[[torch.Tensor, torch.Tensor, Group], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of a model that is never divided over pipeline stages.

    ``kind`` says where it may stand: the ``input`` block takes token ids, ``layer`` blocks are dealt to the stages, the
    ``output`` block stands before the loss.
    """

    name: str
    kind: str
    build: Callable[[Context], nn.Module]
