"""How many failures a run bears: a budget for each cause, which real progress fills up again.

A cause is an exception by its type, the death of a process, or silence. The loss of a node and preemption are nobody's
fault and use up nothing. Progress is a step finished that no attempt had finished before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rayformer.events import CellError

UNLIMITED = -1
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """``used`` failures of each cause in a row without progress, the last when the run stood at ``reached``."""

    max_failures: int
    used: Mapping[str, int] = field(default_factory=dict)
    reached: int = -1

    def after(self, error: CellError, *, step: int) -> Budget:
        """With one more failure, at which the run can go on after ``step``."""
        used = dict(self.used) if step <= self.reached else {}
        if error.kind != "node":
            used[cause_of(error)] = used.get(cause_of(error), 0) + 1
        return replace(self, used=used, reached=max(step, self.reached))

    @property
    def is_exceeded(self) -> bool:
        """Whether the failures so far are too many; with ``max_failures`` 0 a single one is, whatever its cause."""
        return self.max_failures == 0 or not self.bears(max(self.used.values(), default=0))

    def bears(self, num: int) -> bool:
        """Whether ``num`` failures in a row are not too many."""
        return self.max_failures == UNLIMITED or num <= self.max_failures

    @property
    def in_words(self) -> str:
        """What is told when it is exceeded."""
        num = max(self.used.values(), default=0)
        return (
            f"it was failure {num} of its kind in a row without a new step, and more than recovery.max_failures="
            f"{self.max_failures} are not repaired"
        )

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next try: none after a first failure, then 1, 2, 4, up to 30."""
        repeated = max(self.used.values(), default=0) - 1
        doublings = min(repeated - 1, 10)  # an unlimited budget may have seen thousands
        return 0.0 if repeated < 1 else min(2.0**doublings, LONGEST_PAUSE_S)


def cause_of(error: CellError) -> str:
    """What two errors have in common if they count as the same failure again."""
    return f"raised {error.message.partition(':')[0]}" if error.kind == "raised" else error.kind
