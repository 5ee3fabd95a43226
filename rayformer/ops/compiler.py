"""The line between what torch.compile compiles and what stays outside: communication, and what adds to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


@torch.compiler.disable
def not_compiled(function: Callable[..., Result], *args: object) -> Result:
    """``function(*args)``, never traced."""
    return function(*args)
