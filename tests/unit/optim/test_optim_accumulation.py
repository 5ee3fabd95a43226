"""Gradients accumulate in float32 in a flat buffer, whatever the parameters are; masters start unrounded and decay."""

import doctest

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rayformer.config.model import ModelConfig
from rayformer.config.optim import OptimConfig, PrecisionConfig
from rayformer.groups import Communicator, Group, single
from rayformer.models import decoder
from rayformer.models.block import build_block
from rayformer.nn.context import Context, Parameter, parameter_specs
from rayformer.nn.embedding import PositionEmbedding, VocabParallelEmbedding
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear
from rayformer.nn.norm import LayerNorm, RMSNorm
from rayformer.optim import plan as plan_module
from rayformer.optim.adamw import ShardedAdamW
from rayformer.optim.buffers import FlatParameters, GradBuffers
from rayformer.optim.plan import ALIGNMENT, plan_buckets
from rayformer.optim.reduction import BucketReduction, sum_partial
from rayformer.optim.tied import TiedParameters
from rayformer.shards import Init, ParamSpec

SMALL = 2.0**-9  # half the distance from 1 to the next bfloat16, so that adding it to 1 gives 1


def parameter(value, name="weight", *, borrowed=False, **options):
    """One of our parameters, as a layer makes it."""
    made = Parameter(torch.as_tensor(value, dtype=torch.float32))
    made.spec = ParamSpec(name=name, shape=tuple(made.shape), init=Init(), **options)
    made.borrowed = borrowed
    return made


def flat(parameters, *, borrowed=(), leaves=1, dtype=torch.bfloat16):
    """Flat memory of parameters by name, and its gradient buffers, open."""
    named, lent = ([(p.spec.name, p) for p in group] for group in (parameters, borrowed))
    sizes, lent_sizes = ([(name, p.numel()) for name, p in group] for group in (named, lent))
    plan = plan_buckets(sizes, dp=1, alone=[name for name, _ in lent], borrowed=lent_sizes)
    memory = FlatParameters(named, plan, borrowed=lent, dtype=dtype)
    grads = GradBuffers(named, plan, leaves=range(leaves), num_leaves=leaves, borrowed=lent)
    grads.start_step()
    return memory, grads


def reduced(memory, grads, leaves=1):
    """The gradient of every bucket, summed over all leaves."""
    return [
        BucketReduction(bucket, grads.close_bucket(bucket), num_leaves=leaves, dp=single(("dp",))).result()
        for bucket in memory.plan.buckets
    ]


def uses():
    """Modules, and what goes into them so that each element of the weight has the output's gradient as its own."""
    ids, one = torch.tensor([[0, 1]]), torch.ones(1, 1, 3, dtype=torch.bfloat16)
    return {
        "column layer": (ColumnParallelLinear(3, 2, name="layer"), one),
        "row layer": (RowParallelLinear(3, 2, name="layer"), one),
        "embedding": (VocabParallelEmbedding(2, 3, name="layer"), ids),
        "rms norm": (RMSNorm(3, name="layer", eps=0.0), one),
        "layer norm": (LayerNorm(3, name="layer", eps=1e-5), torch.tensor([[[-1.0, 0.0, 1.0]]]).bfloat16()),
        "positions": (PositionEmbedding(2, 3, name="layer"), torch.zeros(1, 2, 3, dtype=torch.bfloat16)),
    }


@pytest.mark.parametrize("use", uses())
def test_small_gradients_of_bfloat16_parameters_are_not_lost(use):  # B71
    layer, x = uses()[use]
    weight = list(layer.parameters())[-1]  # of a layer norm the bias
    memory, grads = flat(list(layer.parameters()))
    for value in [1.0] + [SMALL] * 256:
        y = layer(x)
        y.backward(torch.full_like(y, value))
    assert weight.dtype == y.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    assert weight.grad.unique().tolist() == [1.5]
    (total,) = reduced(memory, grads)
    (slot,) = (slot for slot in memory.plan.slots if slot.name == weight.spec.name)
    assert total[slot.start : slot.stop].unique().tolist() == [1.5]
    assert torch.tensor(1.0).bfloat16() + torch.tensor(SMALL).bfloat16() == 1.0


def test_small_gradients_are_not_lost_between_virtual_ranks():  # B71
    weight = parameter([0.0])
    memory, grads = flat([weight], leaves=257)
    for leaf, value in enumerate([1.0] + [SMALL] * 256):
        (weight * torch.tensor(value, dtype=torch.bfloat16)).backward()
        if leaf < 256:
            grads.close_leaf(leaf)
    assert reduced(memory, grads, leaves=257)[0][0] == 1.5
    assert grads.num_buffers == 9  # floor(log2(257)) + 1


def test_a_gradient_is_a_view_of_the_buffer_and_starts_at_zero_in_every_step():
    weight, bias = parameter(torch.ones(2, 3)), parameter(torch.ones(2), "bias")
    memory, grads = flat([weight, bias])
    for _ in range(3):
        grads.start_step()
        assert not weight.grad.any() and not bias.grad.any()
        (functional.linear(torch.ones(1, 3, dtype=torch.bfloat16), weight, bias) * 2).sum().backward()
        (total,) = reduced(memory, grads)
        at = {slot.name: slot.start for slot in memory.plan.slots}
        assert at == {"bias": 0, "weight": ALIGNMENT}
        assert total[:2].tolist() == [2, 2] and total[ALIGNMENT : ALIGNMENT + 6].tolist() == [2] * 6
        assert weight.grad.untyped_storage().data_ptr() == bias.grad.untyped_storage().data_ptr() == total.data_ptr()
    assert grads.num_buffers == 1


def optimizer(memory, parameters, *, dp=None, zero=1, params="bf16", **options):
    return ShardedAdamW(
        memory,
        {p.spec.name: p.spec for p in parameters},
        OptimConfig(zero=zero, **options),
        precision=PrecisionConfig(params=params),
        tp=single(),
        dp=dp or single(("dp",)),
        tied=TiedParameters(memory.plan, tied=[], pp=single(("pp",)), borrower=0),
    )


def masters(optimizers, shapes):
    """The masters by name, put together from those of all replicas."""
    found = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for shard in (shard for one in optimizers for shard in one.unique_state()):
        name, _, kind = shard.tensor.rpartition("@")
        if kind == "master":
            found[name][tuple(map(slice, shard.box.lo, shard.box.hi))] = shard.value.numpy()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_16_bit_parameters_start_from_unrounded_values(dtype):
    values = np.random.default_rng(0).standard_normal((3, 500), dtype=np.float32)
    weight = parameter(values)
    memory, _ = flat([weight], dtype=dtype)
    one = optimizer(memory, [weight])
    np.testing.assert_array_equal(masters([one], {"weight": (3, 500)})["weight"], values)
    assert torch.equal(weight.detach(), torch.from_numpy(values).to(dtype))
    assert (weight.detach().float().numpy() != values).mean() > 0.9
    assert one.state_bytes == 3 * 4 * memory.plan.numel


def test_float32_parameters_are_their_own_masters():
    weight = parameter(torch.ones(3))
    memory, _ = flat([weight], dtype=torch.float32)
    one = optimizer(memory, [weight], params="fp32")
    (master,) = (shard.value for shard in one.owned_state() if shard.tensor.endswith("@master"))
    assert master.data_ptr() == weight.data_ptr()
    assert one.state_bytes == 2 * 4 * memory.plan.numel


def replica(rank, size):
    """The dp group as member ``rank`` of ``size`` sees it, as long as nothing is sent."""
    return Group(
        axes=("dp",), communicator=Communicator(tuple(range(size)), None), rank=rank, device=torch.device("cpu")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dp", "zero"), [(1, 1), (2, 1), (2, 0), (3, 1)])
def test_matrices_decay_and_vectors_do_not(dp, zero, dtype):  # B77
    rng = np.random.default_rng(1)
    start = {
        "a.weight": rng.standard_normal((40, 50), dtype=np.float32),  # two blocks, cut between replicas
        "norm.weight": np.ones(1500, np.float32),
        "a.bias": rng.standard_normal(700, dtype=np.float32),
        "b.weight": rng.standard_normal((3, 1000), dtype=np.float32),
    }
    replicas = []
    for rank in range(dp):
        parameters = [parameter(value.copy(), name, decay=value.ndim > 1) for name, value in start.items()]
        named = [(p.spec.name, p) for p in parameters]
        plan = plan_buckets([(name, p.numel()) for name, p in named], dp=dp, bucket_elements=4 * ALIGNMENT)
        memory = FlatParameters(named, plan, dtype=dtype)
        one = optimizer(memory, parameters, dp=replica(rank, dp), zero=zero, params="bf16")
        one.update([torch.zeros(hi - lo) for lo, hi in one.owned], lr=0.1, weight_decay=0.5)
        replicas.append(one)
    found = masters(replicas, {name: value.shape for name, value in start.items()})
    for name, value in start.items():
        if value.ndim > 1:
            np.testing.assert_allclose(found[name], 0.95 * value, rtol=1e-6, err_msg=name)
            assert not np.array_equal(found[name], value)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_what_decays_is_a_matrix_of_the_built_in_model():  # B77
    for options in (
        {},
        {"norm": "layernorm", "bias": True, "position": "learned", "max_positions": 8},
        {"qk_norm": True},
    ):
        blocks, _ = decoder.build(ModelConfig(layers=1, hidden=16, heads=2, ffn=24, vocab=32, **options))
        specs = parameter_specs(nn.ModuleList(build_block(block, Context()) for block in blocks))
        assert {spec.decay for spec in specs.values()} == {True, False}
        for name, spec in specs.items():
            assert spec.decay == (len(spec.shape) > 1), name


def test_both_uses_of_a_tied_parameter_are_summed_apart_and_then_added():
    """Their sum has these bits however many stages there are; one accumulator would give others."""
    own, lent = parameter(torch.zeros(2), tied=True), parameter(torch.zeros(2), borrowed=True, tied=True)
    memory, grads = flat([own], borrowed=[lent], leaves=2, dtype=torch.float32)
    assert lent.data_ptr() == own.data_ptr()
    tiny = 2.0**-24  # half the distance from 1 to the next float32
    for leaf, (of_own, of_lent) in enumerate([(1.0, tiny), (0.0, tiny)]):
        ((own * of_own).sum() + (lent * of_lent).sum()).backward()
        if leaf == 0:
            grads.close_leaf(leaf)
    shards = reduced(memory, grads, leaves=2)
    tied = TiedParameters(memory.plan, tied=["weight"], pp=single(("pp",)), borrower=0)
    tied.add_gradients(shards)
    assert shards[0][0] == 1 + 2 * tiny and (torch.tensor(1.0) + tiny) + tiny == 1
    assert shards[1][0] == 2 * tiny, "the borrowed sum is left as it is"


def test_each_tied_parameter_gets_its_own_borrowed_sum():
    plan = plan_buckets([("a", 5), ("b", 5), ("c", 5)], dp=1, alone=["a", "c"], borrowed=[("a", 5), ("c", 5)])
    assert [[slot.name for slot in bucket.slots] for bucket in plan.buckets] == [["c"], ["b"], ["a"], ["a"], ["c"]]
    shards = [torch.full((4,), value) for value in (1.0, 2.0, 4.0, 8.0, 16.0)]
    TiedParameters(plan, tied=["a", "c"], pp=single(("pp",)), borrower=0).add_gradients(shards)
    assert [shard[0].item() for shard in shards] == [17, 2, 12, 8, 16]


class Ranks:
    """A tp group of which this process plays one member; the others' tensors are given."""

    def __init__(self, everybody):
        self.size = len(everybody)
        self._everybody = everybody

    def all_gather(self, out, own):
        out.copy_(torch.cat(self._everybody))
        return single().all_reduce(own)


def test_partial_gradients_are_added_in_rank_order_and_nothing_else_is_touched():
    large = 2.0**24
    everybody = [torch.tensor([large, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-large, 4.0])]
    shards = [torch.tensor([9.0, 9.0, large]), torch.tensor([9.0, 1.0, 9.0])]
    sum_partial(shards, [(0, 2, 3), (1, 1, 2)], Ranks(everybody))
    assert [shard.tolist() for shard in shards] == [[9, 9, 0], [9, 7, 9]]  # (2^24 + 1) - 2^24 = 0 in float32
    sum_partial(shards, [], Ranks(everybody))
    sum_partial(shards, [(0, 0, 3)], single())
    assert [shard.tolist() for shard in shards] == [[9, 9, 0], [9, 7, 9]]


def drawn(plan):
    """A bucket a word, in blocks of 1024: a letter for a parameter, a dash for padding, bars between dp shards."""
    words = []
    for bucket in plan.buckets:
        blocks = ["-"] * ((bucket.stop - bucket.start) // ALIGNMENT)
        for slot in bucket.slots:
            for at in range((slot.start - bucket.start) // ALIGNMENT, -(-(slot.stop - bucket.start) // ALIGNMENT)):
                blocks[at] = slot.name.upper() if bucket.borrowed else slot.name
        width = len(blocks) // plan.dp
        words.append("|".join("".join(blocks[rank * width : (rank + 1) * width]) for rank in range(plan.dp)))
    return " ".join(words)


@pytest.mark.parametrize(
    ("dp", "options", "picture"),
    [
        (1, {}, "cbb aaa"),
        (2, {}, "cb|b- aa|a-"),
        (1, {"rooms": {"b": 2048}}, "cbb aaa"),
        (1, {"rooms": {"b": 4096, "c": 1025}}, "c-bb-- aaa"),
        (1, {"alone": ["a"]}, "cbb aaa"),
        (1, {"alone": ["c"]}, "c bbaaa"),
        (2, {"alone": ["b"]}, "c|- b|b aa|a-"),
        (1, {"alone": ["a"], "borrowed": ["a"]}, "cbb aaa AAA"),
        (2, {"alone": ["a"], "borrowed": ["a"]}, "cb|b- aa|a- AA|A-"),
        (3, {"alone": ["a"], "borrowed": ["a"]}, "c|b|b a|a|a A|A|A"),
        (2, {"alone": ["a", "c"], "borrowed": ["a", "c"]}, "c|- b|b aa|a- AA|A- C|-"),
        (1, {"alone": ["c"], "borrowed": ["c"], "rooms": {"c": 2048}}, "c- bbaaa C-"),
        (1, {"chunks": {"b": 1, "c": 1}, "borrowed": ["a"], "borrowing_chunk": 1}, "cbb aaa AAA"),
        (1, {"chunks": {"c": 1}}, "c bbaaa"),
    ],
    ids=str,
)
def test_rooms_single_and_borrowed_parameters_lie_as_drawn(dp, options, picture):
    sizes = {"a": 2049, "b": 2040, "c": 7}
    options = {**options, "borrowed": [(name, sizes[name]) for name in options.get("borrowed", ())]}
    plan = plan_buckets(list(sizes.items()), dp=dp, bucket_elements=3 * ALIGNMENT, **options)
    assert drawn(plan) == picture
    assert all((bucket.stop - bucket.start) % (dp * ALIGNMENT) == 0 for bucket in plan.buckets)
    for bucket in plan.borrowed:
        owner = plan.bucket_of(bucket.slots[0].name)
        assert bucket.stop - bucket.start == owner.stop - owner.start, "cut alike, so that shards can be added"


def test_a_stage_without_the_owner_borrows_memory_of_its_own():
    lent, other = parameter(torch.full((3,), 7.0), "table", borrowed=True, tied=True), parameter(torch.ones(2), "norm")
    plan = plan_buckets([("norm", 2)], dp=1, borrowed=[("table", 3)])
    memory = FlatParameters([("norm", other)], plan, borrowed=[("table", lent)], dtype=torch.bfloat16)
    assert drawn(plan) == "norm TABLE"
    assert [bucket.borrowed for bucket in plan.buckets] == [False, True]
    assert memory.buffer.numel() == plan.numel and lent.data_ptr() == memory.buffer[ALIGNMENT:].data_ptr()
    assert lent.tolist() == [7, 7, 7] and [slot.name for slot in plan.slots] == ["norm"]


def test_the_example_in_the_docstring_of_the_plan_holds():
    result = doctest.testmod(plan_module)
    assert result.attempted and not result.failed
