"""The line between what torch.compile compiles and what stays outside: communication, and what is new in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def _call(function: Callable[..., Any], *args: object) -> Any:
    return function(*args)


_outside = _call


def not_compiled(function: Callable[..., Result], *args: object) -> Result:
    """``function(*args)``, never traced."""
    result: Result = _outside(function, *args)
    return result


def hold_the_line() -> None:
    """Call this before anything is compiled: torch's way to keep code outside loads its compiler, 1.7 seconds."""
    global _outside
    if _outside is _call:
        _outside = torch.compiler.disable(_call)
