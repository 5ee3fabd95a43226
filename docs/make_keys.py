"""Writes docs/keys.md, the table of every key of a job file, from the models in rayformer/config/.

python docs/make_keys.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayformer.config.job import Job
from rayformer.config.keys import is_list, keys_of, section_of
from rayformer.config.model import CustomModelConfig

HEAD = """\
# Keys of a job file

Written by `python docs/make_keys.py` from the models in `rayformer/config/`; change a key there.

A job file is one YAML mapping of the sections below. What has a default may be left out. `rayformer train JOB --set
KEY=VALUE` overrides a key, written like `optim.lr` or `data.train[0].path`. Values are those of YAML 1.2: `1e-3` is a
number, `yes` is text. An unknown key, a key given twice and an alias are refused.
"""


def keys_page() -> str:
    """The whole page."""
    sections = [(f"{name}[i]" if is_list(field) else name, section_of(field)) for name, field in keys_of(Job).items()]
    own = list(_section("model", CustomModelConfig, title="model, of your own"))
    lines = (line for name, section in sections if section for line in _section(name, section))
    return "\n".join([HEAD, *lines, *own])


def _section(name: str, section: type[BaseModel], *, title: str = "") -> Iterator[str]:
    yield f"## {title or name}\n\n{section.__doc__}\n"
    yield "| key | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    yield from _rows(name, section)
    yield ""


def _rows(prefix: str, section: type[BaseModel]) -> Iterator[str]:
    for key, field in keys_of(section).items():
        kind = _kind(field.annotation, field.metadata)
        yield f"| `{prefix}.{key}` | {kind} | {_default(field)} | {field.description} |"
        if inner := section_of(field):
            yield from _rows(f"{prefix}.{key}{'[i]' if is_list(field) else ''}", inner)


def _kind(annotation: Any, bounds: list[Any]) -> str:
    """A type in a reader's words, such as "integer from 1, or auto"."""
    arguments = [a for a in get_args(annotation) if a is not Ellipsis]
    if get_origin(annotation) is Literal:
        choices = [str(choice) for choice in arguments]
        return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else choices[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    if get_origin(annotation) is tuple:
        count = "" if Ellipsis in get_args(annotation) else f"{len(arguments)}, "
        return f"list of {count}each {_kind(arguments[0], [])}"
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__, _flat(annotation.__metadata__))
    if arguments:
        return ", or ".join(_kind(argument, []) for argument in arguments)
    name = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null"}[annotation]
    return ", ".join([name, *_bounds(bounds)])


def _flat(metadata: tuple[Any, ...]) -> list[Any]:
    return [bound for item in metadata for bound in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _bounds(bounds: list[Any]) -> Iterator[str]:
    for bound in bounds:
        match bound:
            case Ge(ge):
                yield f"at least {ge:g}"
            case Gt(gt):
                yield f"above {gt:g}"
            case Lt(lt):
                yield f"below 2^{lt.bit_length() - 1}" if isinstance(lt, int) else f"below {lt:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    match field.default:
        case None:
            return "null"
        case bool() as flag:
            return str(flag).lower()
        case tuple() as items:
            return str(list(items))
        case value:
            return str(value)


if __name__ == "__main__":
    (Path(__file__).parent / "keys.md").write_text(keys_page(), encoding="utf-8")
