"""Values as Python source, laid out as the formatter would lay them out.

A value that fits stays on its line. The arguments of a call may share a line of their own; otherwise each part has its
line and a trailing comma, which the formatter keeps. Every string goes through ``repr``, so no spec can write code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 120
INDENT = 4


@dataclass(frozen=True, slots=True)
class Ref:
    """A name defined elsewhere in the module."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call with positional arguments and keywords."""

    function: str
    keywords: Mapping[str, object]
    args: tuple[object, ...] = ()


def source(value: object, *, indent: int = 0, used: int = 0, after: int = 0) -> str:
    """``value`` as source. ``used`` columns of its first line are taken, ``after`` follow its last one."""
    line = flat(value)
    if indent + used + len(line) + after <= WIDTH or not has_parts(value):
        return line
    opening, closing, parts = split(value)
    inner = indent + INDENT
    if isinstance(value, Call):
        arguments = line[len(opening) : -1]
        if inner + len(arguments) <= WIDTH:
            return f"{opening}\n{' ' * inner}{arguments}\n{' ' * indent}{closing}"
    lines = [opening]
    for prefix, part in parts:
        text = source(part, indent=inner, used=len(prefix), after=1)
        lines.append(f"{' ' * inner}{prefix}{text},")
    lines.append(" " * indent + closing)
    return "\n".join(lines)


def assignment(name: str, value: object) -> str:
    """``NAME = value``."""
    return f"{name} = {source(value, used=len(name) + 3)}"


def flat(value: object) -> str:
    """``value`` on one line."""
    if isinstance(value, Ref):
        return value.name
    if isinstance(value, str):
        return string(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(flat, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(flat, value))}]"
    if isinstance(value, Call):
        parts = [*map(flat, value.args), *(f"{name}={flat(item)}" for name, item in value.keywords.items())]
        return f"{value.function}({', '.join(parts)})"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise TypeError(f"no literal for {type(value).__name__}")


def string(text: str) -> str:
    """A string in the quotes that the formatter prefers: double ones, unless that needs more escapes."""
    body = repr(text)
    quote, inner = body[0], body[1:-1]
    if quote == "'" and '"' not in text:
        return f'"{inner}"'
    if quote == "'" and text.count('"') <= text.count("'"):  # repr escaped the single quotes only
        return '"' + inner.replace("\\'", "'").replace('"', '\\"') + '"'
    return body


def has_parts(value: object) -> bool:
    """Whether a value can be laid out on several lines."""
    return bool(value) and isinstance(value, tuple | list | Call) and bool(split(value)[2])


def split(value: object) -> tuple[str, str, Sequence[tuple[str, object]]]:
    """Opening, closing, and the parts of a value with what stands before each."""
    if isinstance(value, tuple):
        return "(", ")", [("", item) for item in value]
    if isinstance(value, list):
        return "[", "]", [("", item) for item in value]
    assert isinstance(value, Call)
    parts: list[tuple[str, object]] = [("", item) for item in value.args]
    return f"{value.function}(", ")", parts + [(f"{name}=", item) for name, item in value.keywords.items()]
