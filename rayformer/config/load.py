"""Reading a job file: strict YAML, overrides from the command line, and every problem with it at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rayformer.config.job import Job
from rayformer.config.keys import KeyPath, dotted, field_at, keys_of, nearest_key, section_of
from rayformer.config.rules import batch_problems, rule_problems
from rayformer.config.strict_yaml import NotYaml, parse
from rayformer.errors import ConfigError, Problem

Tree = dict[str, Any]
Check = Callable[[Job], Iterable[Problem]]


def load_job(path: Path, overrides: Sequence[str] = (), checks: Sequence[Check] = (batch_problems,)) -> Job:
    """The job in the YAML file ``path`` with ``KEY=VALUE`` overrides applied.

    ``checks`` are further questions to a job, such as whether its files exist; the default takes it for a first start.
    Raises ConfigError with every problem that the file, the rules between keys and the checks show, all at once.
    """
    tree, problems = _read(path)
    problems += _override(tree, overrides)
    return _checked(tree, problems, checks)


def job_from_tree(tree: Tree, checks: Sequence[Check] = (batch_problems,)) -> Job:
    """The job of plain values. Raises ConfigError with every problem found."""
    return _checked(deepcopy(tree), [], checks)


def _read(path: Path) -> tuple[Tree, list[Problem]]:
    """The tree of a job file, and what is wrong with its keys; ConfigError if there is no tree."""

    def refuse(rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem(keys={"JOB": str(path)}, rule=rule, fix=fix)])

    try:
        tree, problems = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(f"it can't be read ({error.strerror})", "name a readable YAML job file") from None
    except UnicodeDecodeError as error:
        raise refuse(f"byte {error.start} is not UTF-8 text", "save it as UTF-8") from None
    except NotYaml as error:
        raise refuse(str(error), "correct the YAML there") from None
    if not isinstance(tree, dict) or not tree:
        found = "nothing" if not tree else "a list" if isinstance(tree, list) else f"only {tree!r}"
        raise refuse(f"a job file is a mapping of sections, and this holds {found}", "start from one in jobs/")
    return tree, problems


def _override(tree: Tree, overrides: Sequence[str]) -> list[Problem]:
    """Set each ``KEY=VALUE`` in the tree; a problem for each that can't be."""
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"[^.\[\]\s]+(\.[^.\[\]\s]+|\[\d+\])*", key):
            problems.append(Problem(keys={"--set": override}, rule="an override is KEY=VALUE", fix="write --set a.b=c"))
            continue
        try:
            value, repeated = parse(text)
        except NotYaml as error:
            problems.append(Problem(keys={key: text}, rule=f"the value is not YAML ({error})", fix="quote it"))
            continue
        problems += repeated
        names = [int(name[1:-1]) if name[0] == "[" else name for name in re.findall(r"\[\d+\]|[^.\[\]]+", key)]
        at: Any = tree
        for name, following in pairwise([*names, None]):
            if isinstance(at, list) != isinstance(name, int) or (isinstance(at, list) and name not in range(len(at))):
                rule = f"there is no {dotted(names[: names.index(name) + 1])} to set"
                problems.append(Problem(keys={key: text}, rule=rule, fix="set the whole list, written like [a, b]"))
                break
            if following is None:
                at[name] = value
            elif isinstance(name, str) and not isinstance(at.get(name), (dict, list)):
                at[name] = {}
            at = at[name]
    return problems


def _checked(tree: Tree, problems: list[Problem], checks: Sequence[Check]) -> Job:
    """The job of ``tree``, which is used up. Raises ConfigError with ``problems`` and all that are found here.

    A bad value is told once and then replaced by a default or a stand-in, so that every rule can be tried; what a rule
    says of a key that was bad is not told, as it may be a mere consequence.
    """
    problems = list(problems)
    bad_keys = {key for problem in problems for key in problem.keys}

    def tell(found: Problem) -> None:
        if not any(_related(key, bad) for key in found.keys for bad in bad_keys):
            problems.append(found)

    while True:
        try:
            job = Job.model_validate(tree)
            break
        except ValidationError as error:
            found = [(_path(detail, tree), detail) for detail in error.errors()]
        for path, detail in found:
            tell(told := _problem(path, detail))
            bad_keys.update(told.keys)
        for path, _ in found:
            _repair(tree, path)
    for check in (rule_problems, *checks):
        for told in check(job):
            tell(told)
    if problems:
        raise ConfigError(problems)
    return job


def _related(key: str, other: str) -> bool:
    """Whether two dotted keys are the same, or one lies in the other."""
    shorter, longer = sorted((key, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


# What replaces a required value that is missing or bad: it passes every rule with almost any other values.
STAND_INS: dict[str, Any] = {
    "run": {},
    "run.name": "x",
    "run.steps": 10**9,
    "model": {},
    "model.layers": 1 << 20,
    "model.hidden": 1 << 20,
    "model.heads": 1,
    "model.ffn": 1 << 20,
    "model.vocab": 1 << 30,
    "model.factory": "x:x",
    "batch": {},
    "batch.global": 1,
    "batch.seq": 1,
    "data": {},
    "data.train": [{"path": "python-stdlib"}],
    "faults[i]": {"kill": "pp0", "step": 1},
}


def _repair(tree: Tree, path: KeyPath) -> None:
    """Put a stand-in where a bad value is, or take it out, so that its default holds."""
    *section, name = path[:2]
    at: Any = tree[str(section[0])] if section else tree
    if isinstance(name, int):  # of a section that is a list, the whole entry, so that the others keep their numbers
        at[name] = deepcopy(STAND_INS[f"{section[0]}[i]"])
        return
    stand_in = STAND_INS.get(dotted((*section, name)))
    if stand_in is not None:
        at[name] = deepcopy(stand_in)
    else:
        at.pop(name, None)


def _path(detail: ErrorDetails, tree: Tree) -> KeyPath:
    """The keys of the tree that an error is about, without the names of union members that pydantic appends."""
    path: list[str | int] = []
    at: Any = tree
    for part in detail["loc"]:
        inside = part in at if isinstance(at, dict) else isinstance(at, list) and part in range(len(at))
        if not inside:
            return [*path, part] if detail["type"] == "missing" else path
        at = at[part]
        path.append(part)
    return path


# The rule and the way out for each kind of error that pydantic tells; the braces are filled from its context.
_TOLD = {
    "int_type": ("must be an integer", "write a whole number"),
    "float_type": ("must be a number", "write a number such as 0.001 or 1e-3"),
    "finite_number": ("must be a finite number", "write a number such as 0.001 or 1e-3"),
    "bool_type": ("must be true or false", "write true or false"),
    "string_type": ("must be text", "write it in quotes"),
    "model_type": ("must be a mapping of keys", "write its keys below it, indented"),
    "tuple_type": ("must be a list", "write it like {example}"),
    "too_short": ("it has too few entries", "write it like {example}"),
    "too_long": ("it has too many entries", "write it like {example}"),
    "greater_than": ("must be above {gt}", "use a number above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "use {ge} or more"),
    "less_than": ("must be below {lt}", "use a number below {lt}"),
    "less_than_equal": ("must be at most {le}", "use {le} or less"),
    "string_too_short": ("must not be empty", "write it, or leave the key out"),
    "string_pattern_mismatch": ("only letters, digits, dots, dashes and underscores, at most 64", "use another name"),
    "literal_error": ("must be {expected}", "use {expected}"),
    "step_or_range": ("must be a step of at least 1, or the first and the last of some", "write it like 7 or [5, 9]"),
}


def _problem(path: KeyPath, detail: ErrorDetails) -> Problem:
    kind, value = detail["type"], detail["input"]
    field = field_at(path)
    if kind == "missing" and isinstance(path[-1], int):
        kind, path = "too_short", path[:-1]  # of a list with a fixed number of entries; value is the list
    elif kind == "missing":
        assert field is not None
        rule = "it has no default and must be given"
        return Problem(keys={dotted(path): "missing"}, rule=rule, fix=f"add it: {_description(field)}")
    key = dotted(path)
    shown = "{...}" if isinstance(value, dict) else value
    if kind == "extra_forbidden":
        return Problem(keys={key: shown}, rule="there is no such key", fix=nearest_key(path))
    assert field is not None
    if Literal["auto"] in get_args(field.annotation):
        rule, fix = "must be an integer of at least 1, or auto", "use a whole number or auto"
        return Problem(keys={key: shown}, rule=rule, fix=fix)
    context = dict(detail.get("ctx", {}), example=_example(field))
    if "expected" in context:
        context["expected"] = context["expected"].replace("'", "")
    told = _TOLD.get(kind, (detail["msg"].lower(), "write another value"))
    if kind == "string_pattern_mismatch" and key == "model.factory":
        told = ("must name a function", "write it like package.module:function")
    elif kind == "string_pattern_mismatch" and key != "run.name":
        told = ("must not have control characters", "write it without them")
    rule, fix = (text.format_map(context) for text in told)
    return Problem(keys={key: shown}, rule=rule, fix=fix)


def _description(field: FieldInfo) -> str:
    section = section_of(field)
    if field.description or section is None:
        return field.description or ""
    required = [name for name, inner in keys_of(section).items() if inner.is_required()]
    return f"a mapping with at least {', '.join(required)}"


def _example(field: FieldInfo) -> str:
    if field.examples:
        return str(field.examples[0])
    return str(list(field.default)) if isinstance(field.default, tuple) else "[{path: python-stdlib}]"
