"""What a failed run says: the first cause first, its consequences grouped below it."""

from __future__ import annotations

from collections.abc import Sequence

from rayformer.events import CellError

_WEIGHT = {"node": 0, "died": 1, "raised": 2, "silent": 3, "collateral": 4}


def first_cause(errors: Sequence[CellError]) -> CellError:
    """The error that explains the others: a death, an exception, silence, a lost connection, and then by arrival."""
    return min(errors, key=lambda error: _WEIGHT[error.kind])


def explain(errors: Sequence[CellError]) -> str:
    """One message for all errors of a run."""
    cause = first_cause(errors)
    lines = [f"{_who(cause)}: {cause.message}" if cause.cell else cause.message]
    alike = [e for e in errors if e is not cause and e.kind != "collateral" and e.message == cause.message]
    if alike:
        lines.append(f"  the same in {len(alike)} more: {', '.join(e.cell for e in alike)}")
    for error in errors:
        if error is not cause and error not in alike and error.kind != "collateral":
            lines.append(f"  then {_who(error)}: {error.message}")
    collateral = [e.cell for e in errors if e is not cause and e.kind == "collateral"]
    if collateral:
        lines.append(f"  cells that only lost their connection to it: {', '.join(collateral)}")
    return "\n".join(lines)


def _who(error: CellError) -> str:
    if not error.cell:
        return "the controller"
    return f"cell {error.cell} ({error.worker})" if error.worker else f"cell {error.cell}"
