"""The learning rate of every update, a pure function of its number."""

from __future__ import annotations

import math

from rayformer.config.optim import OptimConfig


def learning_rate(update: int, section: OptimConfig) -> float:
    """The rate that update number ``update``, from 1, uses.

    It rises linearly over ``warmup_steps``, then stays (constant) or falls along half a cosine to ``min_lr``, which it
    keeps from ``decay_steps`` on.
    """
    warmup = section.warmup_steps
    if update <= warmup:
        return section.lr * (update / warmup)  # exactly lr at its end
    if section.decay == "constant":
        return section.lr
    if update >= section.num_decay_steps:
        return section.min_lr
    progress = (update - warmup) / (section.num_decay_steps - warmup)
    return section.min_lr + (section.lr - section.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
