"""A journal replays to the story it was written from, and says where it does not."""

import json

import pytest

from rayformer.cli.replay import replay_command
from rayformer.control.journal import ReplayError, attempt_entry, entry_of, in_words, replay
from rayformer.control.machine import Machine
from rayformer.control.messages import (
    CellBroke,
    CellDrained,
    CellEnded,
    CellFailed,
    CellLost,
    CellPlaced,
    CellReady,
    CellStalled,
    ControllerFailed,
    DeadlinePassed,
    HeldSaved,
    NoRoom,
    Placed,
    PlacementFailed,
    StopAsked,
    Surveyed,
    WaitOver,
)
from rayformer.control.policy import Budget
from rayformer.control.restore import Held, Holdings
from rayformer.control.states import Member, Starting
from rayformer.events import CellDone, CellError

A, B = CELLS = ("pp0", "pp1")
DIED = CellError(cell=B, worker="worker-0001", kind="died", message="its process died: 137")
FELL = CellError(cell=A, worker="worker-0000", kind="collateral", message="connection closed")
HELD = Held(cells={A: Holdings(holder=(3, 4)), B: Holdings(holder=(3, 4), second_holder=(3,))})
DONE = CellDone(generation=2, outcome="stopped", step=4, checkpoint="step-000000004")


def ready(cell, g):
    return CellReady(generation=g, cell=cell, member=Member(worker=f"of-{cell}", pid=7, node="n", param_addr=2**40))


STORY = [
    Placed(generation=1),
    ready(A, 1),
    ready(B, 1),
    CellBroke(generation=1, error=FELL),
    CellLost(generation=1, error=DIED),
    CellDrained(generation=1, cell=A, standing=4),
    Surveyed(generation=2, number=1, held=HELD),
    NoRoom(generation=2, missing="1 bundle of 1 CPU"),
    StopAsked(generation=1, by="signal"),
    CellPlaced(generation=2, cell=B, worker="worker-0002"),
    Surveyed(generation=2, number=3, held=HELD),
    DeadlinePassed(generation=1),
    ready(B, 2),
    ready(A, 2),
    CellEnded(generation=2, cell=B, done=DONE),
    CellEnded(generation=2, cell=A, done=DONE),
]
STATES = [
    "Starting", "Starting", "Running", "Draining", "Draining", "Rebuilding", "Rebuilding", "Waiting", "Waiting",
    "Rebuilding", "Restoring", "Restoring", "Restoring", "Running", "Running", "Finished",
]  # fmt: skip


def start(max_failures=2):
    return Starting(generation=1, cells=CELLS, budget=Budget(max_failures=max_failures))


def written(attempt=1, story=STORY):
    """The lines of a journal as its file has them: attempts begin at 1000 s, and there is an event every second."""
    machine = Machine(start())
    entries = [(0, attempt_entry(machine.state))]
    for second, event in enumerate(story, start=1):
        entries.append((second, entry_of(event)))
        entries += [(second, entry_of(command)) for command in machine.advance(event)]
    lines = [
        {"time": 1000.0 + second, "attempt": attempt, "generation": entry.generation, "kind": entry.kind}
        | dict(entry.values)
        for second, entry in entries
    ]
    besides = {"time": 1003.5, "attempt": attempt, "generation": 1, "kind": "saved", "step": 2}
    return json.loads(json.dumps([*lines[:8], besides, *lines[8:]]))


def test_a_replayed_journal_goes_through_the_same_states_at_the_same_times():
    told = replay(written())
    assert [one.after for one in told] == STATES
    assert [one.before for one in told] == ["Starting", *STATES[:-1]]
    assert [one.since_s for one in told] == [float(second) for second in range(1, len(STORY) + 1)]
    assert [one.generation for one in told] == [1] * 5 + [2] * 11
    assert told[0].line == 2
    assert told[4].words == "pp1 is lost: its process died: 137"
    assert told[8].words == "asked to stop by signal (told in generation 1)"


def test_the_last_attempt_is_replayed_unless_another_is_named():
    lines = [*written(1), *written(2, STORY[:3])]
    assert [one.after for one in replay(lines)] == STATES[:3]
    assert [one.after for one in replay(lines, attempt=1)] == STATES
    assert replay(lines)[0].line == len(written(1)) + 2
    with pytest.raises(ReplayError, match="no line of attempt 3, expected one of attempts 1, 2"):
        replay(lines, attempt=3)


def test_a_journal_that_ends_before_the_last_commands_replays():
    lines = written(story=STORY[:6])
    assert [line["kind"] for line in lines[-3:]] == ["cell_drained", "replace", "survey"]
    assert replay(lines[:-1]) == replay(lines[:-2]) == replay(lines)


def broken(change):
    lines = written()
    change(lines)
    with pytest.raises(ReplayError) as error:
        replay(lines)
    return error.value


def index_of(kind, lines=None):
    return next(i for i, line in enumerate(lines or written()) if line["kind"] == kind)


def test_a_command_that_differs_is_named_with_its_line_and_what_was_expected():
    at = index_of("join")
    error = broken(lambda lines: lines[at].update(lost=[A]))
    assert error.line == at + 1
    found, expected = str(error).split(", expected ")
    assert found.startswith(f"line {at + 1}: found Join(generation=2") and "lost=('pp0',)" in found
    assert expected.startswith("Join(generation=2") and "lost=('pp1',)" in expected
    assert [one.after for one in error.told] == STATES[:11]


def test_a_command_too_few_or_too_many_is_found():
    at = index_of("abort")
    few = broken(lambda lines: lines.pop(at))
    assert few.line == at + 2 and "found CellLost(" in str(few) and "expected Abort(" in str(few)  # ``saved`` between
    many = broken(lambda lines: lines.insert(at, lines[at]))
    assert many.line == at + 2 and "found Abort(" in str(many) and "expected the next event" in str(many)


def test_an_event_that_the_machine_has_no_place_for_is_named():
    at = index_of("cell_ready")
    error = broken(lambda lines: lines.insert(at, {**lines[at], "kind": "wait_over"}))
    assert error.line == at + 1 and "expected an event that Starting has a place for" in str(error)


def test_a_line_that_is_no_message_is_named():
    at = index_of("cell_lost")
    unknown = broken(lambda lines: lines[at].update(kind="cell_vanished"))
    assert f"line {at + 1}: found the event cell_vanished" in str(unknown)
    incomplete = broken(lambda lines: lines[at]["error"].pop("kind"))
    assert f"line {at + 1}: found cell_lost with a wrong error.kind, expected Field required" in str(incomplete)


def test_an_attempt_without_its_first_line_is_named():
    assert "line 1: found placed, expected the line 'attempt'" in str(broken(lambda lines: lines.pop(0)))
    assert "wrong max_failures" in str(broken(lambda lines: lines[0].pop("max_failures")))
    assert "expected the lines of an attempt" in str(broken(lambda lines: lines.clear()))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (PlacementFailed(generation=1, missing="2 nodes"), "not every cell found a place: 2 nodes"),
        (CellFailed(generation=1, error=DIED), "pp1 failed: its process died: 137"),
        (CellStalled(generation=1, error=DIED), "pp1 stalls: its process died: 137"),
        (CellDrained(generation=1, cell=A, standing=None), "pp0 stands still, its state in pieces"),
        (HeldSaved(generation=1, done=DONE), "what was held of step 4 is saved as step-000000004"),
        (WaitOver(generation=1), "the time to wait for room is over"),
        (ControllerFailed(generation=1, message="disk full"), "the controller failed: disk full"),
    ],
)
def test_events_are_told_in_words(event, words):
    assert in_words(event) == words


@pytest.fixture
def journal(tmp_path):
    def write(lines):
        path = tmp_path / "journal.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


def test_the_story_is_printed_in_columns(journal, capsys):
    assert replay_command(journal(written()), None, False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(STORY)
    assert " ".join(lines[5].split()) == "6.000 s g2 Draining -> Rebuilding pp0 stands still after step 4"
    assert lines[3].index("pp0 lost a peer") == lines[4].index("pp1 is lost")


def test_the_story_is_printed_as_json(journal, capsys):
    assert replay_command(journal([*written(1), *written(2, STORY[:3])]), 1, True) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["after"] for one in told] == STATES
    assert told[4].keys() == {"line", "since_s", "generation", "before", "after", "words"}


def test_a_journal_that_does_not_replay_is_told_up_to_there(journal, capsys):
    lines = written()
    at = index_of("join")
    lines[at]["pause_s"] = 4.0
    path = journal(['{"time": 1, "att\n', *lines])  # a controller that died left half a line
    assert replay_command(path, None, False) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 11
    assert err.startswith(f"error: {path}: line {at + 2}: found Join(") and "pause_s=4.0" in err


def test_a_journal_that_is_not_there_is_an_error(tmp_path, capsys):
    assert replay_command(tmp_path / "journal.jsonl", None, False) == 1
    out, err = capsys.readouterr()
    assert not out.strip()
    assert err == f"error: {tmp_path / 'journal.jsonl'}: No such file or directory; name the journal.jsonl of a run\n"
