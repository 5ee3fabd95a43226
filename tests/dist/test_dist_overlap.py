"""When messages start and when they are waited for, seen on real steps; and where gradients lie meanwhile.

Buckets are small, so that there are several in every stage and some cross from one layer into the next.
"""

import gc
import json
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from cells import SMALL_BUCKETS, job_tree, open_cell, world_of

from rayformer.cell.step import StepRunner
from rayformer.stages.tape import Tape

IN_FLIGHT = {"reductions": 4, "sends": 8}


@dataclass(frozen=True)
class Event:
    """Something that happened on one cell; ``at`` is a segment, a bucket, or how many of the kind came before.

    forward, backward, passed              a segment runs; backward begins at it; backward is through down to it
    exchange, gather, recv, send           a message starts
    exchanged, gathered, received, sent    it has been waited for
    begin, finish, next                    a step's phases, and its end
    """

    kind: str
    at: int = 0
    microbatch: int = 0
    tag: int = 0


STARTS = {"exchange": "exchanged", "gather": "gathered", "recv": "received", "send": "sent"}


@contextmanager
def written_down(cell, events):
    """Let everything that happens on ``cell`` be added to ``events``."""
    plan, dp, pp, stage = cell.parameters.plan, cell.groups.dp, cell.groups.pp, cell.stages[0]
    first_sample = cell.samples(cell.job.batch.global_).start
    micro = cell.job.batch.micro
    starts = {bucket.start: i for i, bucket in enumerate(plan.buckets)}
    parameters, exchange, gather = cell.parameters.buffer, dp.all_to_all, dp.all_gather

    def offset(tensor, base):
        """Where ``tensor`` starts in the memory of ``base``, in elements; None if it lies elsewhere."""
        if tensor.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
            return None
        return tensor.storage_offset()

    def watched(ticket, kind, **values):
        events.append(Event(kind, **values))
        wait = ticket.wait

        def wait_and_note():
            wait()
            events.append(Event(STARTS[kind], **values))

        ticket.wait = wait_and_note
        return ticket

    def all_to_all(out, tensor, *splits):
        (grads,) = {p.grad.untyped_storage().data_ptr(): p.grad for p in stage.parameters()}.values()
        return watched(exchange(out, tensor, *splits), "exchange", at=starts[offset(tensor, grads)])

    def all_gather(out, tensor):
        at = offset(out, parameters)
        ticket = gather(out, tensor)
        return ticket if at is None else watched(ticket, "gather", at=starts[at])

    def counted(operation, kind):
        def start(tensor, peer, tag):
            number = sum((e.kind, e.tag) == (kind, tag) for e in since_begin(events))
            return watched(operation(tensor, peer, tag), kind, at=number, tag=tag)

        return start

    def microbatch(samples):
        return (samples[0] - first_sample) // micro

    run, backward = stage.run, Tape.backward

    def run_and_note(number, x):
        events.append(Event("forward", number, microbatch(stage.moment.samples)))
        return run(number, x)

    def backward_and_note(tape, grad, first, **options):
        v = microbatch(tape._samples)
        events.append(Event("backward", tape._graphs[-1].stop - 1, v))
        gradient = backward(tape, grad, first, **options)
        events.append(Event("passed", first, v))
        return gradient

    dp.all_to_all, dp.all_gather, stage.run = all_to_all, all_gather, run_and_note
    pp.recv, pp.send = counted(pp.recv, "recv"), counted(pp.send, "send")
    with patch.object(Tape, "backward", backward_and_note):
        yield


def since_begin(events):
    last = max((i for i, event in enumerate(events) if event.kind == "begin"), default=0)
    return events[last:]


def segments_of_buckets(cell):
    """For every bucket the segments of this stage that hold parameters in it."""
    held = [{p.spec.name for p in block.parameters()} for block in cell.stages[0].blocks]
    return [
        sorted({i for i, names in enumerate(held) for slot in bucket.slots if slot.name in names})
        for bucket in cell.parameters.plan.buckets
    ]


def events_of_steps(member, tree, steps):
    """A task: the events of each step of this cell, and the segments of its buckets."""
    events = []
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        runner = StepRunner(cell)
        with written_down(cell, events):
            for step in range(steps):
                events.append(Event("begin"))
                measured = runner.begin(step + 1, step * cell.job.batch.global_)
                runner.vote(stop=False)
                events.append(Event("finish"))
                runner.finish(measured, 1e-3)
                events.append(Event("next"))
            cell.optimizer.await_parameters()
        ends = [i for i, event in enumerate(events) if event.kind == "next"]
        return [events[a + 1 : b + 1] for a, b in pairwise([-1, *ends])], segments_of_buckets(cell)


LAYOUTS = [{"dp": 2}, {"dp": 2, "pp": 2}]


@pytest.fixture(scope="module")
def steps_of(run_cells, corpus):
    """``steps_of(layout, ...)``: by rank the events of two steps, and the segments of the buckets; each run once."""
    known = {}

    def run(layout, *, overlap=True, **options):
        tree = job_tree(corpus, layout=layout, optim={"overlap": overlap}, **options)
        key = json.dumps(tree)
        if key not in known:
            known[key] = run_cells(world_of(tree), events_of_steps, tree, 2)
        return known[key]

    return run


def places(events, kind):
    return {event.at: i for i, event in enumerate(events) if event.kind == kind}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_bucket_is_exchanged_when_backward_has_passed_it_and_not_at_the_end(steps_of, layout):
    for (events, _), segments in steps_of(layout):
        last = max(event.microbatch for event in events if event.kind == "passed")
        started = places(events, "exchange")
        assert sorted(started) == list(range(len(segments))) and len(segments) >= 3
        assert any(len(held) > 1 for held in segments)
        for bucket, held in enumerate(segments):
            passed = [e.at for e in events[: started[bucket]] if e.kind == "passed" and e.microbatch == last]
            rest = [e.at for e in events[started[bucket] :] if e.kind == "backward"]
            assert passed[-1] == min(held), "it starts right behind the part of backward that completes it"
            assert max(rest, default=-1) == min(held) - 1, "and all parts below it are still to run"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_without_overlap_exchanges_follow_the_last_backward(steps_of, layout):
    for (events, _), segments in steps_of(layout, overlap=False):
        started = places(events, "exchange")
        assert len(started) == len(segments)
        assert min(started.values()) > max(i for i, e in enumerate(events) if e.kind in ("backward", "passed"))


@pytest.mark.parametrize("overlap", [True, False])
def test_an_exchange_is_waited_for_after_backward_or_to_make_room(steps_of, overlap):
    for (events, _), segments in steps_of({"dp": 2}, overlap=overlap):
        in_flight, most = [], 0
        end_of_program = max(places(events, "exchange").values())
        for i, event in enumerate(events):
            if event.kind == "exchange":
                in_flight.append(event.at)
                most = max(most, len(in_flight))
            elif event.kind == "exchanged":
                assert i > end_of_program or len(in_flight) == IN_FLIGHT["reductions"]
                assert in_flight.pop(0) == event.at
        assert not in_flight and most == IN_FLIGHT["reductions"] < len(segments)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parameters_are_gathered_while_the_next_step_runs_and_waited_for_where_they_are_needed(steps_of, layout):
    for (first, second), segments in steps_of(layout):
        kinds = [event.kind for event in first]
        assert "gathered" not in kinds and kinds.count("gather") == len(segments)
        assert [event.at for event in first if event.kind == "gather"] == list(reversed(range(len(segments))))
        assert kinds.index("gather") > kinds.index("finish")
        waited = [event.at for event in second if event.kind == "gathered"]
        assert sorted(waited) == list(range(len(segments)))
        assert [min(segments[bucket]) for bucket in waited] == sorted(min(held) for held in segments)
        forward = [event for event in second if event.kind == "forward" and event.microbatch == 0]
        assert [event.at for event in forward] == list(range(forward[-1].at + 1))
        waits = places(second, "gathered")
        for bucket, held in enumerate(segments):
            following = next(event for event in second[waits[bucket] :] if event.kind == "forward")
            assert (following.microbatch, following.at) == (0, min(held))


ACTIVATION, GRADIENT = 0, 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_receive_is_posted_before_the_computation_that_precedes_its_use(steps_of, layout, schedule):
    batch = {"global": 8 * layout.get("dp", 1)}
    cells = steps_of(layout, schedule=schedule, batch=batch)
    replica = len(cells) // 2
    for cells_of_stage, tag, computes in (
        (cells[:replica], GRADIENT, "backward"),
        (cells[replica:], ACTIVATION, "forward"),
    ):
        for (events, _), _ in cells_of_stage:
            posted = {e.at: i for i, e in enumerate(events) if e.kind == "recv" and e.tag == tag}
            used = {e.at: i for i, e in enumerate(events) if e.kind == "received" and e.tag == tag}
            began = {}
            for i, event in enumerate(events):
                if event.kind == computes:
                    began.setdefault(event.microbatch, i)
            assert sorted(posted) == sorted(used) == sorted(began) == list(range(8))
            for v in range(7):
                assert posted[v + 1] < began[v] < used[v + 1]


@pytest.mark.parametrize("microbatches", [8, 12])
def test_a_send_is_waited_for_after_the_program_or_to_make_room(steps_of, microbatches):
    for (events, _), _ in steps_of({"pp": 2}, batch={"global": microbatches}):
        computing = [i for i, e in enumerate(events) if e.kind in ("forward", "passed")]
        in_flight, early = 0, 0
        for i, event in enumerate(events):
            if event.kind == "send":
                in_flight += 1
            elif event.kind == "sent":
                if i < computing[-1]:
                    assert in_flight == IN_FLIGHT["sends"]
                    early += 1
                in_flight -= 1
        assert early <= microbatches - IN_FLIGHT["sends"]
        assert sum(event.kind == "send" for event in events) == microbatches


def gradient_memory(member, tree):
    """A task: whether gradients lay in the open buffer around every part of backward, and how many parts there were."""
    checks = 0
    gc.collect()
    gc.freeze()  # what there is already is not looked through again and again
    with ExitStack() as at_end, open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        at_end.callback(gc.unfreeze)
        runner, plan = StepRunner(cell), cell.parameters.plan
        parameters = {p.spec.name: p for p in cell.stages[0].parameters()}
        weights = {tuple(parameter.shape) for parameter in parameters.values()}

        def storage(tensor):
            return tensor.untyped_storage().data_ptr()

        def the_open_buffer():
            """The one storage of all gradients, each in its slot."""
            for slot in plan.slots:
                grad = parameters[slot.name].grad
                assert (grad.storage_offset(), grad.numel(), grad.dtype) == (slot.start, slot.numel, torch.float32)
                assert grad.untyped_storage().nbytes() == 4 * plan.numel
            (found,) = {storage(parameter.grad) for parameter in parameters.values()}
            return found

        backward = Tape.backward

        def checked(tape, grad, first, **options):
            nonlocal checks
            checks += 1
            before = the_open_buffer()
            during = []
            hooks = [
                p.register_post_accumulate_grad_hook(lambda p: during.append(storage(p.grad)))
                for p in parameters.values()
            ]
            gradient = backward(tape, grad, first, **options)
            for hook in hooks:
                hook.remove()
            assert {before, *during, the_open_buffer()} == {before}
            known = {before, storage(cell.parameters.buffer), *(storage(s.value) for s in cell.optimizer.owned_state())}
            stray = [
                tensor.shape
                for tensor in gc.get_objects()
                if isinstance(tensor, torch.Tensor)
                and tensor.dtype == torch.float32
                and tuple(tensor.shape) in weights
                and storage(tensor) not in known
            ]
            assert not stray, stray
            return gradient

        with patch.object(Tape, "backward", checked):
            for step in (1, 2):
                measured = runner.begin(step, 0)
                assert measured.norm > 0
                runner.finish(measured, 1e-3)
        cell.optimizer.await_parameters()
    return checks


@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [{}, {"dp": 2, "pp": 2}], ids=str)
def test_gradients_are_added_straight_into_the_open_buffer_in_float32(run_cells, corpus, layout, params):
    tree = job_tree(
        corpus, layout=layout, batch={"virtual_ranks": 4}, precision={"params": params}, optim={"overlap": True}
    )
    for checks in run_cells(world_of(tree), gradient_memory, tree):
        if layout:
            assert checks > 2 * 8 // layout["dp"], "the last microbatch's backward is in parts"
        else:
            assert checks == 2 * 8, "nothing to overlap with"


def test_many_bfloat16_microbatches_have_the_gradient_norm_of_one(reference, corpus):  # B71
    batch, precision = {"global": 64, "virtual_ranks": 1}, {"params": "bf16"}
    norms = [reference(job_tree(corpus, batch={**batch, "micro": n}, precision=precision), 1)[0][0][1] for n in (1, 64)]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
