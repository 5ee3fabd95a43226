"""The errors a caller may catch, and the one form in which a problem with a job is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a job: the keys and values found, the rule they break, and a way out.

    >>> str(Problem(keys={"layout.tp": 3, "model.heads": 4}, rule="tp must divide heads", fix="use 1, 2 or 4"))
    'layout.tp=3, model.heads=4: tp must divide heads; use 1, 2 or 4'
    """

    keys: Mapping[str, object]
    rule: str
    fix: str

    def __str__(self) -> str:
        found = ", ".join(f"{key}={_shown(value)}" for key, value in self.keys.items())
        return f"{found}: {self.rule}; {self.fix}"


def _shown(value: object) -> str:
    if isinstance(value, str) and value and value.isprintable() and " " not in value:
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


class RayformerError(Exception):
    """Base of every error that rayformer raises on purpose."""


class ConfigError(RayformerError):
    """What a user wrote can't be run. Carries every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class DataError(RayformerError):
    """A data file is not what its name or header says it is."""


class CheckpointError(RayformerError):
    """A checkpoint is incomplete, damaged, or does not hold what is asked of it."""


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were written: reading it again would not help."""


class SnapshotError(RayformerError):
    """A snapshot in a holder's memory is gone or not whole; another place may have it."""


class CollectiveError(RayformerError):
    """A collective or a message could not complete, mostly because another cell is gone."""


class RunError(RayformerError):
    """A run ended with a failure; the message names the cell and the first cause."""
