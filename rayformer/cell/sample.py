"""Text from the trained model: every cell of the first replica takes part, one token at a time.

Draws are keyed by (seed, "sample", position), so the text is a function of the weights and the seed.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from rayformer.cell.build import Cell
from rayformer.data.tokenizers import get_tokenizer
from rayformer.shards import share_start
from rayformer.stages.lowering import lower
from rayformer.stages.schedules.forward_only import forward_only

PROMPT = "def "


@torch.no_grad()
def sample_text(cell: Cell, *, num_tokens: int = 160, temperature: float = 0.7) -> str:
    """Continue ``def `` by ``num_tokens`` tokens; all cells of a replica must call it, and all get the same text."""
    groups, seq, seed = cell.groups, cell.job.batch.seq, cell.job.run.seed
    tokenizer = get_tokenizer(cell.job.data.tokenizer)
    ids = [int(i) for i in tokenizer.encode(PROMPT)]
    bits = np.random.Philox(key=np.array([seed, xxhash.xxh3_64_intdigest(b"sample")], dtype=np.uint64))
    draws = np.random.Generator(bits).random(num_tokens)
    stage_map = cell.stage_map
    last_rank = stage_map.rank(stage_map.last) * groups.layout.tp  # the first tp rank of the last stage
    token = torch.zeros(1, dtype=torch.int64, device=groups.device)
    for draw in draws:
        context = ids[-seq:]
        logits = _logits(cell, context, len(context) - 1)
        if logits is not None:
            known = logits[: tokenizer.vocab_size].cpu().double()  # a model may have more ids than its tokenizer
            weights = torch.softmax(known / temperature, dim=-1).cumsum(dim=-1)
            token[0] = min(int((weights < float(draw) * float(weights[-1])).sum()), len(weights) - 1)
        groups.model.broadcast(token, last_rank).wait()
        ids.append(int(token))
        if ids[-1] == tokenizer.eod:
            break
    return tokenizer.decode(np.array(ids))


def _logits(cell: Cell, context: list[int], position: int) -> torch.Tensor | None:
    """The logits [V] after ``context``, on the rank of the last stage; the context is padded to a whole sample."""
    batch, seq = cell.job.batch.micro, cell.job.batch.seq
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device=cell.groups.device)
    tokens[0, : len(context)] = torch.tensor(context)
    stage_map, rank = cell.stage_map, cell.groups.cell.pp
    program = lower(forward_only(stage_map.pp, stage_map.chunks, 1), vee=stage_map.vee)[rank]
    logits = cell.executor.infer(program, {0: tokens}).get(0)
    return None if logits is None else _whole(cell, logits[0, position])


def _whole(cell: Cell, part: torch.Tensor) -> torch.Tensor:
    """The logits of the whole vocabulary from every tp rank's part."""
    tp, vocab = cell.groups.tp, cell.job.model.vocab
    if part.numel() == vocab:  # a model of the user's own may not divide its output layer
        return part
    whole = part.new_zeros(vocab)
    start = share_start(vocab, tp.size, tp.rank)
    whole[start : start + part.numel()] = part
    tp.all_reduce(whole).wait()
    return whole
