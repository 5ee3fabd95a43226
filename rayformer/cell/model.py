"""The model that a job names: the built-in decoder, or one that a factory of the user's gives."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rayformer.config.model import CustomModelConfig, ModelConfig
from rayformer.errors import ConfigError, Problem
from rayformer.models import decoder
from rayformer.models.block import Block, TokenLoss


def load_model(section: ModelConfig | CustomModelConfig, base_dir: Path) -> tuple[list[Block], TokenLoss]:
    """The blocks, in order, and the loss. Raises ConfigError for a factory that can't be used.

    A factory's module is looked for in ``base_dir`` too, where the job was submitted.
    """
    if isinstance(section, ModelConfig):
        return decoder.build(section)
    try:
        made = _factory(section, base_dir)(section)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        rule = f"it raised {type(error).__name__}: {error}"
        raise _refused(section, rule, "give the section what the factory asks for, or mend the factory") from error
    fix = "return (blocks, loss), blocks being a list of rayformer.models.block.Block"
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Iterable) and callable(made[1])):
        raise _refused(section, f"it returned {type(made).__name__}, not a pair of blocks and a loss", fix)
    blocks, loss = list(made[0]), made[1]
    strange = [block for block in blocks if not isinstance(block, Block)]
    if strange:
        raise _refused(section, f"one of its blocks is a {type(strange[0]).__name__}", fix)
    kinds = [block.kind for block in blocks]
    if len(kinds) < 3 or kinds != ["input", *["layer"] * (len(kinds) - 2), "output"]:
        raise _refused(
            section, f"its blocks are of the kinds {', '.join(kinds)}", "use one input, then layers, then one output"
        )
    names = [block.name for block in blocks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _refused(section, f"two of its blocks are named {twice!r}", "give each block a name of its own")
    return blocks, loss


def _factory(section: CustomModelConfig, base_dir: Path) -> Callable[[CustomModelConfig], Any]:
    module_name, _, name = section.factory.partition(":")
    if str(base_dir.absolute()) not in sys.path:
        sys.path.insert(0, str(base_dir.absolute()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _refused(
            section, f"{module_name} can't be imported: {error}", f"put it on PYTHONPATH or into {base_dir.absolute()}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        where = module.__file__ or module_name  # a folder without __init__.py has no file
        raise _refused(section, f"{where} has no function {name!r}", "write it like package.module:function")
    build: Callable[[CustomModelConfig], Any] = function
    return build


def _refused(section: CustomModelConfig, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(keys={"model.factory": section.factory}, rule=rule, fix=fix)])
