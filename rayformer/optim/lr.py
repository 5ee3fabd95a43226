"""The learning rate and the weight decay of every update, pure functions of its number.

Update n, from 1, uses what Megatron's scheduler gives at n, with steps for its samples. W is warmup_steps and D
decay_steps:

    lr          /‾‾‾‾‾‾‾‾‾‾‾‾\\           wsd: lr is kept, and the last wsd_steps before D fall
               /              \\
    min_lr    /                \\______   the other shapes fall from W to D; inverse_sqrt drops to min_lr after D
    init_lr  /
             0   W             D
"""

from __future__ import annotations

import math

from rayformer.config.optim import OptimConfig


def learning_rate(update: int, section: OptimConfig) -> float:
    """The rate that update number ``update``, from 1, uses."""
    warmup = section.warmup_steps
    if warmup and update <= warmup:
        return _between(section.init_lr, section.lr, update / warmup)
    if section.decay == "constant":
        return section.lr
    if update > section.num_decay_steps:
        return section.min_lr
    if section.decay == "inverse_sqrt":
        return max(section.min_lr, section.lr * math.sqrt(max(warmup, 1) / max(update, 1)))
    return _between(section.min_lr, section.lr, _height(update, section))


def weight_decay(update: int, section: OptimConfig) -> float:
    """The weight decay that update number ``update``, from 1, uses; it changes from the first one on, also in warm-up.

    >>> section = OptimConfig(weight_decay=0.1, weight_decay_end=0.3, weight_decay_style="linear", decay_steps=4)
    >>> [round(weight_decay(update, section), 3) for update in (1, 2, 3, 4, 5)]
    [0.15, 0.2, 0.25, 0.3, 0.3]
    """
    start, end = section.weight_decay, section.weight_decay_end
    if end is None or section.weight_decay_style == "constant":
        return start
    progress = min(1.0, update / section.num_decay_steps)
    return _between(start, end, progress if section.weight_decay_style == "linear" else 1.0 - _cosine(progress))


def _height(update: int, section: OptimConfig) -> float:
    """Where the rate stands between min_lr and lr: 1 until it starts to fall, 0 at the end of the decay."""
    start: int = section.warmup_steps
    shape: str = section.decay
    if section.decay == "wsd":
        assert section.wsd_steps is not None, "wsd needs optim.wsd_steps"
        start, shape = section.num_decay_steps - section.wsd_steps, section.wsd_decay or "linear"
    if update <= start:
        return 1.0
    progress = (update - start) / (section.num_decay_steps - start)
    match shape:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return _cosine(progress)
        case "exponential":
            return 2.0 * math.pow(0.5, progress) - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(progress)
    raise AssertionError(f"no decay has the shape {shape!r}")


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _between(low: float, high: float, height: float) -> float:
    """At heights 0 and 1 it is exactly ``low`` and ``high``."""
    return high if height >= 1.0 else low + (high - low) * height
