"""Dropout whose masks are keyed by step, sample and site, so that no layout and no recomputation changes them.

Shapes: B samples of a microbatch, each with a mask of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash


@dataclass(kw_only=True)
class Moment:
    """What passes through the model right now: the samples of a microbatch, by their place in the step's global batch.

    ``step`` is None when the model does not train, and nothing is dropped. Whoever runs a microbatch sets it, also when
    it runs one again.
    """

    seed: int = 0
    step: int | None = None
    samples: tuple[int, ...] = ()


def keep_masks(
    shape: Sequence[int],
    p: float,
    *,
    moment: Moment,
    site: str,
    device: torch.device,
    generator: torch.Generator,
    rows: slice = slice(None),
) -> torch.Tensor:
    """Which elements of ``shape`` are kept, for every sample of ``moment``: [B, *shape], true with chance 1 - ``p``.

    ``generator`` is seeded anew for each sample with the key (seed, step, sample, ``site``). Of the masks only ``rows``
    are returned, and nothing holds the others.
    """
    masks = torch.empty(len(moment.samples), *shape, dtype=torch.float32, device=device)
    for mask, sample in zip(masks, moment.samples):
        key = f"{moment.seed}/{moment.step}/{sample}/{site}"
        generator.manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)
        mask.uniform_(generator=generator)
    return masks[:, rows] >= p


def dropped(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` where ``keep`` is true, scaled by 1 / (1 - p), and zero elsewhere; one byte an element is kept."""
    y: torch.Tensor = _Dropped.apply(x, keep, 1.0 / (1.0 - p))
    return y


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None
