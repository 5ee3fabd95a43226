"""PyTorch's own ways to train the plain model, each with the settings that were fastest here.

A peer is a function ``(workload, corpus, rank, world) -> step``; ``step(number)`` trains step ``number``, from 0, and
returns this rank's part of its loss: the parts of all ranks add up to it. No loss is reduced over ranks within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from plain import adamw_groups, fused_adamw, token_loss
from same import same_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from workloads import SEED, Workload

from rayformer.data.corpus import open_corpus
from rayformer.data.loader import SampleReader, TrainingOrder
from rayformer.stages.split import split_blocks

Step = Callable[[int], torch.Tensor]
GATHERED_VOCAB = 1024  # up to here whole logits on every rank are faster than loss_parallel


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How to build a peer, on how many processes, and rayformer's layout to compare it with."""

    build: Callable[[Workload, Path, int, int], Step]
    world: int
    layout: dict[str, int]
    settings: str


def single(w: Workload, corpus: Path, rank: int, world: int) -> Step:
    model = same_model(w)
    optimizer = fused_adamw(model.parameters(), w)
    data = Data(w, corpus)

    def step(number: int) -> torch.Tensor:
        total = torch.zeros(())
        for tokens, labels in data.microbatches(number, 0, w.num_microbatches):
            loss = token_loss(model(tokens), labels) / w.num_microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), w.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def ddp(w: Workload, corpus: Path, rank: int, world: int) -> Step:
    module = same_model(w)
    optimizer = fused_adamw(module.parameters(), w)
    return ddp_step(module, optimizer, w, corpus, rank, world)


def ddp_zero(w: Workload, corpus: Path, rank: int, world: int, params: str = "fp32") -> Step:
    """DDP with the optimizer's state divided over ranks, for memory.py; 16-bit compute is autocast there."""
    module = same_model(w)
    matrices, vectors = adamw_groups(module.parameters(), w)
    optimizer = ZeroRedundancyOptimizer(
        matrices["params"],
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        fused=True,
        lr=w.lr,
        betas=w.betas,
        eps=w.eps,
        weight_decay=w.weight_decay,
    )
    optimizer.add_param_group(vectors)
    return ddp_step(module, optimizer, w, corpus, rank, world, autocast=params == "bf16")


def ddp_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    w: Workload,
    corpus: Path,
    rank: int,
    world: int,
    autocast: bool = False,
) -> Step:
    model = DistributedDataParallel(
        module, static_graph=True, gradient_as_bucket_view=True, forward_sync_buffers=False, bucket_cap_mb=1
    )
    data = Data(w, corpus)
    mine = w.num_microbatches // world

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for i, (tokens, labels) in enumerate(data.microbatches(number, rank * mine, mine)):
            # With a static graph the very first backward must be a synchronised one.
            with model.no_sync() if number and i < mine - 1 else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = token_loss(model(tokens), labels) / mine
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(module.parameters(), w.clip, foreach=True)
        optimizer.step()
        return total / world

    return step


def fsdp(w: Workload, corpus: Path, rank: int, world: int) -> Step:
    model = same_model(w)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = fused_adamw(model.parameters(), w)
    data = Data(w, corpus)
    mine = w.num_microbatches // world

    def step(number: int) -> torch.Tensor:
        total = torch.zeros(())
        for i, (tokens, labels) in enumerate(data.microbatches(number, rank * mine, mine)):
            last = i == mine - 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            loss = token_loss(model(tokens), labels) / mine
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), w.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / world

    return step


def pipeline(w: Workload, corpus: Path, rank: int, world: int) -> Step:
    whole = same_model(w)
    costs = [0, *[w.layer_matrices] * w.layers, w.hidden * w.vocab]
    blocks = split_blocks("auto", costs=costs, pp=world)[rank]  # as rayformer deals them
    module = whole[blocks.start : blocks.stop]
    first, last = rank == 0, rank == world - 1
    hidden = torch.empty(w.micro, w.seq, w.hidden, requires_grad=True)
    stage = PipelineStage(
        module,
        rank,
        world,
        torch.device("cpu"),
        input_args=(torch.zeros(w.micro, w.seq, dtype=torch.int64) if first else hidden,),
        output_args=(torch.empty(w.micro, w.seq, w.vocab, requires_grad=True) if last else hidden,),
    )
    schedule = Schedule1F1B(
        stage,
        w.num_microbatches,
        loss_fn=lambda logits, labels: token_loss(logits, labels) / w.num_microbatches,
        scale_grads=False,
    )
    optimizer = fused_adamw(module.parameters(), w)
    data = Data(w, corpus)

    def step(number: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if first:
            schedule.step(data.batch(number)[0], return_outputs=False)
        elif last:
            schedule.step(target=data.batch(number)[1], losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters()], foreach=True).square()
        dist.all_reduce(norm)
        nn.utils.clip_grads_with_norm_(module.parameters(), w.clip, norm.sqrt(), foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())

    return step


def tensor_parallel(w: Workload, corpus: Path, rank: int, world: int) -> Step:
    model = same_model(w, tp=world)
    mesh = init_device_mesh("cpu", (world,))
    layer_plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.gate_up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    gathered = w.vocab <= GATHERED_VOCAB
    head = ColwiseParallel(output_layouts=Replicate()) if gathered else ColwiseParallel(use_local_output=False)
    parallelize_module(model[0], mesh, RowwiseParallel(input_layouts=Replicate()))
    for layer in model[1:-1]:
        parallelize_module(layer, mesh, layer_plan)
    parallelize_module(model[-1], mesh, {"linear": head})
    update = LocalUpdate(model, w)
    data = Data(w, corpus)

    def step(number: int) -> torch.Tensor:
        total = torch.zeros(())
        for tokens, labels in data.microbatches(number, 0, w.num_microbatches):
            with nullcontext() if gathered else loss_parallel():
                loss = token_loss(model(tokens), labels) / w.num_microbatches
                loss.backward()
            total += local(loss.detach())
        update()
        return total / world

    return step


class LocalUpdate:
    """Clips and updates the local shards of a tensor-parallel model, past DTensor's slow dispatch of each operation."""

    def __init__(self, model: nn.Module, w: Workload) -> None:
        self._clip = w.clip
        self._pairs = [(p, nn.Parameter(local(p).detach())) for p in model.parameters()]
        self._optimizer = fused_adamw((own for _, own in self._pairs), w)

    def __call__(self) -> None:
        sharded, replicated = [], []
        for parameter, own in self._pairs:
            grad, parameter.grad = parameter.grad, None
            if isinstance(parameter, DTensor):
                own.grad = local(grad.redistribute(placements=parameter.placements))
                sharded.append(own.grad)
            else:
                own.grad = grad
                replicated.append(grad)
        square = nn.utils.get_total_norm(sharded, foreach=True).square()
        dist.all_reduce(square)
        norm = (square + nn.utils.get_total_norm(replicated, foreach=True).square()).sqrt()
        nn.utils.clip_grads_with_norm_([own for _, own in self._pairs], self._clip, norm, foreach=True)
        self._optimizer.step()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Data:
    """The samples of rayformer's own training order, read by rayformer's own reader."""

    def __init__(self, w: Workload, corpus: Path) -> None:
        stream = open_corpus(str(corpus), split=(1.0, 0.0, 0.0), tokenizer="byte", cache_dir=Path("unused")).train
        self._order = TrainingOrder(SampleReader(stream, seq=w.seq, vocab=w.vocab), SEED)
        self._w = w

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of a whole step."""
        tokens, labels = self._order.batch(number * self._w.global_batch, self._w.global_batch)
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def microbatches(self, number: int, first: int, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and labels of ``count`` microbatches of a step, from number ``first`` on."""
        micro = self._w.micro
        start = number * self._w.global_batch + first * micro
        tokens, labels = map(torch.from_numpy, self._order.batch(start, count * micro))
        return zip(tokens.split(micro), labels.split(micro))


COMMON = (
    "eager; torch.optim.AdamW(fused=True), zero_grad(set_to_none=True), clip_grad_norm_(foreach=True), F.rms_norm, "
    "F.scaled_dot_product_attention(is_causal), one qkv and one gate_up matrix, cached rotary tables with the sign in "
    "the sine, queries and keys rotated together, losses not reduced over ranks and not read within a slot"
)
DDP = (
    "static_graph, gradient_as_bucket_view, forward_sync_buffers=False, bucket_cap_mb=1 (faster than 25), no_sync "
    "but for the last microbatch"
)
PEERS = {
    "single": Peer(build=single, world=1, layout={}, settings="one process"),
    "ddp": Peer(build=ddp, world=2, layout={"dp": 2}, settings=DDP),
    "fsdp2": Peer(
        build=fsdp,
        world=2,
        layout={"dp": 2},
        settings="fully_shard of every layer and of the root, reshard_after_forward=False; gradient sync and reshard "
        "after backward at the last microbatch only",
    ),
    "pp2": Peer(build=pipeline, world=2, layout={"pp": 2}, settings="Schedule1F1B, static shapes, no merged outputs"),
    "pp4": Peer(build=pipeline, world=4, layout={"pp": 4}, settings="Schedule1F1B, static shapes, no merged outputs"),
    "tp2": Peer(
        build=tensor_parallel,
        world=2,
        layout={"tp": 2},
        settings="Colwise qkv, gate_up and head, Rowwise out, down and embedding, no sequence parallel (0.8 of the "
        f"speed); logits gathered up to vocab {GATHERED_VOCAB}, loss_parallel above; clip and AdamW on local tensors",
    ),
}
