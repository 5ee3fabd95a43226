"""What one layer keeps for backward, byte by byte: divided by tp, by the sequence too, and with recomputation.

Shapes: B samples, S sequence, H hidden, N query heads, G kv heads, D head width, F feed-forward width.
"""

import weakref
from itertools import product

import pytest
import torch
from cells import the_same_on_all

from rayformer.config.model import ModelConfig
from rayformer.config.recompute import RecomputeConfig
from rayformer.groups import single
from rayformer.layout import Layout
from rayformer.models import decoder
from rayformer.models.block import build_block
from rayformer.nn.context import Context
from rayformer.ops.dropout import Moment
from rayformer.optim.buffers import FlatParameters
from rayformer.optim.plan import plan_buckets
from rayformer.stages.stage import Stage
from rayformer.stages.tape import Tape

B, S, H, N, D, F = 2, 32, 64, 8, 8, 96
MODEL = {"layers": 4, "hidden": H, "heads": N, "ffn": F, "vocab": 64}
OPTIONS = {
    "rope": {},
    "grouped queries": {"kv_heads": 4},
    "no positions": {"position": "none"},
    "dropout": {"dropout": 0.1},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "position": "learned", "max_positions": S, "bias": True},
    "explicit": {"attention_impl": "explicit"},
    "attention dropout": {"attention_dropout": 0.1},
}


def layer_parts(options, element):
    """Bytes that a layer keeps of one microbatch by what keeps them; ``element`` is those of a number of the model."""
    groups, token, scores = options.get("kv_heads", N), B * S, B * N * S * S
    # The projection's output stays, as the values are a view of it. Turned queries and keys are a tensor of their own,
    # and where groups have several queries, these are once more in another order.
    qkv = (N + 2 * groups) * D
    if options.get("position", "rope") == "rope":
        qkv += (N + groups) * D
    if groups < N:
        qkv += N * D
    core = token * N * 4  # the normaliser of every query
    if "attention_impl" in options or "attention_dropout" in options:  # the explicit kernel
        qkv = 3 * N * D  # in the order of its products
        core = scores * 4  # probabilities in float32, for softmax
        if element < 4 or "attention_dropout" in options:
            core += scores * element  # and as the product takes them
        if "attention_dropout" in options:
            core += scores  # what is dropped, a byte each
    # layer_norm keeps its input and two statistics; torch's rms_norm, which is made of parts on a CPU, rows before and
    # after the root and one statistic; ours for 16 bit the rows after it and the statistic in float32.
    rms_norm = (2 * H + 1) * 4 if element == 4 else H * element + 4
    norm = (H + 2) * element if options.get("norm") == "layernorm" else rms_norm
    return {
        "norms": 2 * token * norm,
        "inputs": 2 * token * H * element,  # of the two projections behind norms
        "masks": 2 * token * H if "dropout" in options else 0,  # a byte each
        "attention": token * (qkv + N * D) * element,  # and the input of the projection behind it
        "core": core,
        "mlp": token * {"swiglu": 4, "gelu": 2}[options.get("activation", "swiglu")] * F * element,
    }


def causal_mask(options):
    """Bytes that the explicit kernel keeps on every rank alike."""
    return S * S if "attention_impl" in options or "attention_dropout" in options else 0


def closed_form(options, element, *, tp=1, sp=1):
    """Bytes that a layer keeps; norms, what is behind them and dropout are divided by ``sp``, all else by ``tp``."""
    parts = layer_parts(options, element)
    along_sequence = sum(parts.pop(name) for name in ("norms", "inputs", "masks"))
    return along_sequence // sp + sum(parts.values()) // tp + causal_mask(options)


class Kept:
    """The memory that autograd has been asked to keep, each storage once."""

    def __init__(self):
        self._storages = {}

    def add(self, tensor):
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return tensor

    def watch(self):
        return torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor)

    @property
    def bytes(self):
        return sum(storage.nbytes() for storage in self._storages.values())


def more(forward):
    """The bytes that a second microbatch keeps: parameters and tables, which all share, are not among them."""
    kept, sizes, alive = Kept(), [], []
    for _ in range(2):
        alive.append(forward(kept))
        sizes.append(kept.bytes)
    return sizes[1] - sizes[0]


def context(tp, dtype, *, sequence_parallel=False, recomputed=()):
    return Context(
        tp=tp,
        sequence_parallel=sequence_parallel,
        moment=Moment(step=1, samples=tuple(range(B))),
        dtype=dtype,
        recomputed=frozenset(recomputed),
    )


def in_format(module, dtype):
    """Move the parameters into flat memory of ``dtype``, as a cell does."""
    parameters = [(p.spec.name, p) for p in module.parameters()]
    FlatParameters(parameters, plan_buckets([(name, p.numel()) for name, p in parameters], dp=1), dtype=dtype)
    return module


def activations(dtype, parts=1):
    return torch.randn(B, S // parts, H).to(dtype).requires_grad_()


FORMATS = [torch.float32, torch.bfloat16]


def layer_bytes(member, sequence_parallel):
    """A task: the bytes that one layer keeps of a microbatch, for all options and formats."""
    groups, found = member.form(Layout(tp=member.world)), {}
    for (name, options), dtype in product(OPTIONS.items(), FORMATS):
        ctx = context(groups.tp, dtype, sequence_parallel=sequence_parallel)
        layer = in_format(build_block(decoder.build(ModelConfig(**MODEL, **options))[0][1], ctx), dtype)

        def forward(kept, layer=layer, dtype=dtype):
            with kept.watch():
                return layer(activations(dtype, member.world if sequence_parallel else 1))

        found[name, dtype.itemsize] = more(forward)
    groups.close()
    return found


@pytest.fixture(scope="module")
def measured(run_cells):
    """Bytes by option and format, of one process, of two, and of two with a divided sequence."""
    ways = {"whole": (1, False), "tp": (2, False), "sp": (2, True)}
    return {way: the_same_on_all(run_cells(world, layer_bytes, divided)) for way, (world, divided) in ways.items()}


CASES = list(product(OPTIONS, [4, 2]))


@pytest.mark.parametrize(("name", "element"), CASES)
def test_a_layer_keeps_what_the_closed_form_says(measured, name, element):
    for way, divided in (("whole", {}), ("tp", {"tp": 2}), ("sp", {"tp": 2, "sp": 2})):
        assert measured[way][name, element] == closed_form(OPTIONS[name], element, **divided), way


@pytest.mark.parametrize(("name", "element"), CASES)
def test_a_divided_sequence_halves_all_of_it_and_tensor_parallelism_alone_does_not(measured, name, element):
    alike = causal_mask(OPTIONS[name])
    whole, without, halved = (measured[way][name, element] - alike for way in ("whole", "tp", "sp"))
    assert 2 * halved == whole
    assert without > 0.55 * whole


ROWS = B * S * H  # numbers that go from one layer to the next
PARTS = {element: layer_parts({}, element) for element in (2, 4)}
WHOLE = {element: sum(parts.values()) for element, parts in PARTS.items()}
INPUT = {2: ROWS * 2, 4: 0}  # what went in, where the first norm doesn't keep the same float32 rows
RECOMPUTED = {  # and the bytes that two layers then keep, of numbers of e bytes
    "none": ({}, lambda e: INPUT[e] + 2 * WHOLE[e]),
    "full": ({"mode": "full"}, lambda e: 2 * ROWS * e),
    "full, two layers at a time": ({"mode": "full", "layers": 2}, lambda e: ROWS * e),
    "full, one of two": ({"mode": "full", "method": "block", "layers": 1}, lambda e: ROWS * e + INPUT[e] + WHOLE[e]),
    # The kernel's arguments are there anyway, and so is its result, which goes into a projection.
    "core_attn": ({"mode": "selective"}, lambda e: INPUT[e] + 2 * (WHOLE[e] - PARTS[e]["core"])),
    "act": ({"mode": "selective", "modules": ["act"]}, lambda e: INPUT[e] + 2 * (WHOLE[e] - B * S * F * e)),
    "mlp": ({"mode": "selective", "modules": ["mlp"]}, lambda e: INPUT[e] + 2 * (WHOLE[e] - PARTS[e]["mlp"])),
    # Four norms keep their inputs, of which the first is what went in.
    "norm": ({"mode": "selective", "modules": ["norm"]}, lambda e: 4 * ROWS * e + 2 * (WHOLE[e] - PARTS[e]["norms"])),
}


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("mode", RECOMPUTED)
def test_two_layers_keep_what_their_recomputation_says(mode, dtype):
    recompute, expected = RECOMPUTED[mode]
    section = RecomputeConfig(**recompute)
    blocks, loss = decoder.build(ModelConfig(**MODEL))
    ctx = context(single(), dtype, recomputed=section.modules if section.mode == "selective" else ())
    stage = in_format(Stage(blocks, loss, numbers=range(1, 3), ctx=ctx, recompute=section), dtype)

    def forward(kept):
        tape = Tape(stage, step=1, samples=tuple(range(B)))
        with kept.watch():
            tape.forward(activations(dtype), 0, len(stage.segments))
        for graph in tape._graphs:
            kept.add(graph.input)
        return tape

    assert more(forward) == expected(dtype.itemsize)


def test_after_backward_a_tape_keeps_nothing():
    blocks, loss = decoder.build(ModelConfig(**MODEL))
    ctx = context(single(), torch.float32)
    stage = Stage(blocks, loss, numbers=range(1, 3), ctx=ctx, recompute=RecomputeConfig(mode="full"))
    tape = Tape(stage, step=1, samples=tuple(range(B)))
    x = activations(torch.float32)
    tape.forward(x, 0, 2)
    inputs = [weakref.ref(graph.input) for graph in tape._graphs]
    tape.backward(torch.ones_like(tape.output), 0)
    assert tape.output is None and not any(ref() is not None for ref in inputs)
    assert tape.input_grad.shape == x.shape
