"""Strict YAML: the values of YAML 1.2, no key given twice, no aliases, and errors that name the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from rayformer.config.keys import dotted
from rayformer.errors import Problem


class NotYaml(Exception):
    """Text that is not YAML as job files use it; the message has the line."""


class _StrictLoader(yaml.SafeLoader):
    """The values of YAML 1.2: 1e-3 is a number, and yes, 010, 12:30 and 2024-01-31 are text. No aliases."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012, those of YAML 1.1 are not taken over

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="a job file has no aliases, write the value again", problem_mark=mark)
        return super().compose_node(parent, index)


_DIGITS, _EXPONENT = r"[0-9][0-9_]*", r"[eE][-+]?[0-9]+"
for _tag, _first, _pattern in (
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(0|[1-9][0-9_]*)"),
    ("float", "-+.0123456789", rf"[-+]?(({_DIGITS}\.[0-9_]*|\.[0-9]+)({_EXPONENT})?|{_DIGITS}{_EXPONENT})"),
    ("float", "-+.", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), ["", *_first])


def parse(text: str) -> tuple[Any, list[Problem]]:
    """The value of one YAML document, and a problem for every key in it that is given twice."""
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        problems = list(_repeated_keys(node, []))
        return None if node is None else loader.construct_document(node), problems
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise NotYaml(line + _one_line(error.context, error.problem)) from None
    except (yaml.YAMLError, ValueError) as error:
        raise NotYaml(_one_line(str(error))) from None
    except RecursionError:
        raise NotYaml("it is nested too deeply") from None


def _one_line(*parts: str | None) -> str:
    return " ".join(", ".join(part for part in parts if part).split())


def _repeated_keys(node: Any, path: list[str | int]) -> Iterator[Problem]:
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _repeated_keys(item, [*path, i])
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem="a key that is not text", problem_mark=key_node.start_mark)
            name, line = key_node.value, key_node.start_mark.line + 1
            if name in lines:
                value = value_node.value if isinstance(value_node, yaml.ScalarNode) else "{...}"
                rule = f"it is given twice, in lines {lines[name]} and {line}"
                yield Problem(keys={dotted([*path, name]): value}, rule=rule, fix="keep one of them")
            lines[name] = line
            yield from _repeated_keys(value_node, [*path, name])
