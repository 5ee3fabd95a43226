"""Reading a job file: strict YAML, overrides from the command line, and every problem with it at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rayformer.config.data import Source
from rayformer.config.job import Job
from rayformer.config.rules import rule_problems
from rayformer.errors import ConfigError, Problem

Tree = dict[str, Any]


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in the YAML file ``path`` with ``KEY=VALUE`` overrides applied.

    Raises ConfigError with every problem that can be seen in the file itself.
    """
    return job_from_tree(_with_overrides(_read(path), overrides))


def job_from_tree(tree: Tree) -> Job:
    """The job of plain values. Raises ConfigError with every problem found."""
    job, problems, bad_keys = _validate(tree)
    if job is not None:
        problems += [p for p in rule_problems(job) if not any(_touches(key, bad_keys) for key in p.keys)]
    if problems or job is None:
        raise ConfigError(problems)
    return job


def _read(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError([Problem(keys={"JOB": str(path)}, rule=reason, fix="name a readable YAML job file")]) from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except _DuplicateKeys as error:
        raise ConfigError(error.problems) from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f"line {where.line + 1}: " if where is not None else ""
        rule = f"{line}{getattr(error, 'problem', None) or 'this is not YAML'}"
        raise ConfigError([Problem(keys={"JOB": str(path)}, rule=rule, fix="correct the YAML")]) from None
    if not isinstance(tree, dict) or not tree:
        found = "nothing" if tree is None or tree == {} else f"a {type(tree).__name__}"
        rule = f"a job file is a mapping of sections; this holds {found}"
        raise ConfigError([Problem(keys={"JOB": str(path)}, rule=rule, fix="start from one in jobs/, such as tiny.yaml")])
    return tree


class _DuplicateKeys(Exception):
    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe values, with 1e-3 a number as in YAML 1.2, and no key given twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[Problem] = []

    def get_single_data(self) -> Any:
        data = super().get_single_data()
        if self.duplicates:
            raise _DuplicateKeys(self.duplicates)
        return data

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, value_node in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, (list, dict)):
                continue
            if key in seen:
                value = self.construct_object(value_node, deep=True)
                rule = f"given twice, in lines {seen[key]} and {line}"
                self.duplicates.append(Problem(keys={str(key): value}, rule=rule, fix="keep one of them"))
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _with_overrides(tree: Tree, overrides: Sequence[str]) -> Tree:
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            problems.append(Problem(keys={"--set": override}, rule="an override is KEY=VALUE", fix="write --set a.b=c"))
            continue
        try:
            value = yaml.load(text, Loader=_StrictLoader)
        except (yaml.YAMLError, _DuplicateKeys):
            problems.append(Problem(keys={key: text}, rule="the value is not YAML", fix="quote it"))
            continue
        at = tree
        for name in names[:-1]:
            child = at.get(name)
            child = dict(child) if isinstance(child, dict) else {}
            at[name] = child
            at = child
        at[names[-1]] = value
    if problems:
        raise ConfigError(problems)
    return tree


def _validate(tree: Tree) -> tuple[Job | None, list[Problem], set[str]]:
    """The job with every bad value replaced by its default, the problems, and the keys that were bad.

    Without a default for a bad value there is no job to hold the remaining rules against.
    """
    problems: list[Problem] = []
    bad_keys: set[str] = set()
    tree = _copied(tree)
    while True:
        try:
            return Job.model_validate(tree), problems, bad_keys
        except ValidationError as error:
            found = [(detail, _path(detail, tree)) for detail in error.errors()]
        for detail, where in found:
            key = _dotted(where)
            if not any(bad == key or bad.startswith((f"{key}.", f"{key}[")) for bad in bad_keys):
                problems.append(_problem(detail, where, tree))
                bad_keys.add(key)
        if not all([_repair(tree, where) for _, where in found]):
            return None, problems, bad_keys


# A required value that is missing or wrong is replaced by one of these, so that the other rules can still be checked.
_STAND_INS: dict[str, Any] = {
    "run": {"name": "x", "steps": 1},
    "run.name": "x",
    "run.steps": 10**9,
    "model": {"layers": 1, "hidden": 2, "heads": 1, "ffn": 1, "vocab": 1 << 30},
    "model.layers": 1 << 20,
    "model.hidden": 1 << 20,
    "model.heads": 1,
    "model.ffn": 1 << 20,
    "model.vocab": 1 << 30,
    "batch": {"global": 1, "seq": 1},
    "batch.global": 1,
    "batch.seq": 1,
    "data": {"train": [{"path": "python-stdlib"}]},
    "data.train": [{"path": "python-stdlib"}],
}


def _repair(tree: Tree, where: Sequence[str | int]) -> bool:
    """Put a stand-in, or the default, where a bad value is; False if there is neither."""
    key = ".".join(map(str, where[:2]))
    section, name = (tree, str(where[0])) if len(where) == 1 else (tree[str(where[0])], str(where[1]))
    if key in _STAND_INS:
        section[name] = _copied(_STAND_INS[key])
        return True
    return section.pop(name, None) is not None or name not in section


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _path(detail: ErrorDetails, tree: Tree) -> list[str | int]:
    """The keys of the tree that an error is about, without the names of union members that pydantic appends."""
    path: list[str | int] = []
    at: Any = tree
    for part in detail["loc"]:
        inside = part in at if isinstance(at, dict) else isinstance(at, list) and part in range(len(at))
        if not inside:
            if detail["type"] == "missing":
                path.append(part)
            break
        at = at[part]
        path.append(part)
    return path


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _touches(key: str, bad_keys: set[str]) -> bool:
    return any(key == bad or key.startswith((f"{bad}.", f"{bad}[")) or bad.startswith(f"{key}.") for bad in bad_keys)


_WANTED = {
    "int_type": ("must be an integer", "write a whole number"),
    "int_from_float": ("must be an integer", "write a whole number"),
    "float_type": ("must be a number", "write a number such as 0.001 or 1.0e-3"),
    "finite_number": ("must be a finite number", "write a number such as 0.001"),
    "bool_type": ("must be true or false", "write true or false"),
    "string_type": ("must be text", "quote it"),
    "model_type": ("must be a mapping of keys", "write its keys below it, indented"),
    "tuple_type": ("must be a list", "write it like [a, b]"),
}


def _problem(detail: ErrorDetails, path: Sequence[str | int], tree: Tree) -> Problem:
    key, kind, context = _dotted(path), detail["type"], detail.get("ctx", {})
    value: object = detail["input"] if path and kind != "missing" else None
    field = _field_at(path)
    if kind == "missing":
        description = (field or {}).get("description", "")
        return Problem(keys={key: "missing"}, rule="it has no default and must be given", fix=f"add it: {description}")
    if kind == "extra_forbidden":
        return Problem(keys={key: value}, rule="no such key", fix=_nearest(path))
    if isinstance(value, dict) and kind not in ("model_type",):
        value = "{...}"
    if _accepts_auto(path):
        return Problem(keys={key: value}, rule="must be an integer of at least 1, or auto", fix="write one of these")
    if kind in _WANTED:
        rule, fix = _WANTED[kind]
    elif kind == "literal_error":
        expected = str(context["expected"]).replace("'", "")
        rule, fix = f"only {expected} is possible", f"use {expected}"
    elif kind == "string_pattern_mismatch":
        rule, fix = "may have letters, digits, dots, dashes and underscores, at most 64", "choose another name"
    else:
        rule = detail["msg"][0].lower() + detail["msg"][1:].replace("Input ", "").replace("input ", "")
        rule, fix = rule.replace("input ", ""), "change it"
    return Problem(keys={key: value}, rule=rule, fix=fix)


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Job.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        yield name, field.annotation


def _field_at(path: Sequence[str | int]) -> Mapping[str, Any] | None:
    section = dict(_sections()).get(str(path[0])) if path else None
    if section is None or len(path) < 2:
        return None
    for name, field in section.model_fields.items():
        if (field.alias or name) == path[1]:
            return {"description": field.description or "", "annotation": str(field.annotation)}
    return None


def _accepts_auto(path: Sequence[str | int]) -> bool:
    field = _field_at(path)
    return field is not None and "Literal['auto']" in field["annotation"] and "int" in field["annotation"]


def known_keys() -> dict[str, list[str]]:
    """The keys of every section, by section."""
    return {name: [f.alias or key for key, f in model.model_fields.items()] for name, model in _sections()}


# What other systems call our keys.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_steps": "run.steps",
    "train_iters": "run.steps",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
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


def _nearest(path: Sequence[str | int]) -> str:
    """What to write instead of an unknown key: the nearest name in its section, or the section it belongs to."""
    keys = known_keys()
    section, wrong = str(path[0]), str(path[-1]).replace("-", "_")
    if len(path) > 2:
        return f"the keys of {_dotted(path[:-1])} are {', '.join(Source.model_fields)}"
    names = {name: f"{section}.{name}" for name in keys.get(section, [])}
    if len(path) == 1:
        names = {name: name for name in keys}
    for candidates, cutoff in ((names, 0.7), (_ELSEWHERE, 0.7), (_homes(keys), 0.8), (names, 0.5)):
        near = difflib.get_close_matches(wrong, candidates, n=1, cutoff=cutoff)
        if near:
            return f"did you mean {candidates[near[0]]}?"
    return f"the keys here are {', '.join(names)}"


def _homes(keys: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Every key's full name by its own name."""
    return {name: f"{section}.{name}" for section, names in keys.items() for name in names}
