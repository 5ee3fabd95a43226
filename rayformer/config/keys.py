"""The keys of a job file: which there are, how a path of them is written, and which one an unknown name may mean."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayformer.config.job import Job
from rayformer.config.model import CustomModelConfig, ModelConfig

KeyPath = Sequence[str | int]


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the keys that a job file calls them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, itself or as the entries of a list; None for a plain value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def is_list(field: FieldInfo) -> bool:
    """Whether a field is a list of sections, whose entries are written like ``faults[0]``."""
    return get_origin(field.annotation) is tuple and section_of(field) is not None


def field_at(path: KeyPath) -> FieldInfo | None:
    section: type[BaseModel] | None = Job
    field: FieldInfo | None = None
    for name in path:
        if isinstance(name, str):
            fields = keys_of(section) if section else {}
            if section is ModelConfig:
                fields = {**keys_of(CustomModelConfig), **fields}
            field = fields.get(name)
            section = section_of(field) if field else None
    return field


def is_key(key: str) -> bool:
    """Whether ``key``, such as optim.lr, is one of a job file's."""
    section, _, name = key.partition(".")
    field = Job.model_fields.get(section)
    return field is not None and name in keys_of(section_of(field) or Job)


def dotted(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part.isprintable() and re.fullmatch(r"[^\s=:]+", part)
            text += "." * bool(text) + (part if plain else repr(part))
    return text


# What other systems call our keys.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_steps": "run.steps",
    "train_iters": "run.steps",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "num_query_groups": "model.kv_heads",
    "ffn_hidden_size": "model.ffn",
    "intermediate_size": "model.ffn",
    "vocab_size": "model.vocab",
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "data_parallel_size": "layout.dp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "global_batch_size": "batch.global",
    "micro_batch_size": "batch.micro",
    "seq_length": "batch.seq",
    "clip_grad": "optim.clip",
}


def nearest_key(path: KeyPath) -> str:
    """What to write instead of an unknown key: the section it belongs to, or the nearest name in this one."""
    *parents, last = path
    wrong = str(last).replace("-", "_")
    section = section_of(field) if (field := field_at(parents)) else Job
    assert section is not None
    here = {name: dotted([*parents, name]) for name in keys_of(section)}
    home, _, inner = wrong.partition(".")
    if not parents and home in here and inner.isidentifier():
        return f"write {inner} below {home}:, indented"
    homes: Mapping[str, str] = _homes()
    for candidates, cutoff in ((homes, 1.0), (here, 0.7), (_ELSEWHERE, 0.7), (homes, 0.8), (here, 0.5)):
        near = difflib.get_close_matches(wrong, candidates, n=1, cutoff=cutoff)
        if near:
            return f"did you mean {candidates[near[0]]}?"
    return f"the keys here are {', '.join(here)}"


def _homes() -> dict[str, str]:
    """The full names of the keys by their own name, such as "eval.every or checkpoint.every"; not those in lists."""
    homes: dict[str, list[str]] = {}
    for section, field in Job.model_fields.items():
        if is_list(field):
            continue
        for name in keys_of(section_of(field) or Job):
            homes.setdefault(name, []).append(f"{section}.{name}")
    return {name: " or ".join(full) for name, full in homes.items()}
