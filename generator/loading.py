"""suite.toml to a typed spec, or to the list of what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import tomli
from pydantic import ValidationError

from generator.positions import Positions
from generator.problems import Loc, Problem, SpecError, did_you_mean, quote
from generator.spec import Spec, Table

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

LISTS = ("case", "sweep", "known_failure")
TABLES = ("methods", "backends", "pad_styles", "speculations", "case_sets", "profiles")
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Names:
    """Every name the file declares, also in tables that are otherwise broken: what a reference may lead to."""

    methods: frozenset[str]
    backends: frozenset[str]
    pad_styles: frozenset[str]
    speculations: frozenset[str]
    case_sets: frozenset[str]
    profiles: frozenset[str]
    cases: frozenset[str]
    sweeps: frozenset[str]


@dataclass
class Document:
    """A parsed file: the typed spec without its broken tables, and the problems found so far.

    ``origin`` maps the index of a table in the spec's lists to its index in the file, where broken ones still count.
    """

    path: Path
    data: dict[str, Any]
    positions: Positions
    names: Names
    spec: Spec | None = None
    problems: list[Problem] = field(default_factory=list)
    origin: dict[str, list[int]] = field(default_factory=dict)

    def add(self, problems: Iterable[Problem]) -> None:
        """Collect problems whose ``loc`` is a path into the typed spec."""
        for problem in problems:
            head, *rest = problem.loc or ("",)
            if head in self.origin and rest:
                problem = problem.moved((head, self.origin[str(head)][int(rest[0])], *rest[1:]))
            self.problems.append(problem)

    def fail(self) -> None:
        """Stop here where something is wrong."""
        if self.problems:
            raise SpecError(self.problems, self.positions)


def load(path: Path) -> Document:
    """Read and parse ``path``. Raises ``SpecError`` where there is no table to look at."""
    text = read(path)
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        # no position in a table is known yet: point at the character
        message = error.msg[:1].lower() + error.msg[1:]
        raise SpecError([Problem("E-syntax", (), message, at=(error.lineno, error.colno))]) from None
    except RecursionError:
        raise SpecError([Problem("E-syntax", (), "tables or arrays are nested too deeply")]) from None
    document = Document(path, data, Positions(text), declared(data))
    validate(document)
    return document


def read(path: Path) -> str:
    """The text of the file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError([Problem("E-no-file", (), "the file is larger than 16 MiB")])
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "run from the folder that holds suite.toml, or name it with --spec"
        raise SpecError([Problem("E-no-file", (), f"cannot read the spec: {reason}", hint)]) from None
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise SpecError(
            [Problem("E-encoding", (), f"byte 0x{raw[error.start]:02x} is not UTF-8", at=(line, column))]
        ) from None


def validate(document: Document) -> None:
    """Type the file; where tables are broken, report them and type the rest."""
    try:
        document.spec = Spec.model_validate(document.data)
        return
    except ValidationError as error:
        details = error.errors(include_url=False)
    document.problems += translate(details, document.data)
    rest, document.origin = without(document.data, {detail["loc"][:2] for detail in details})
    try:
        document.spec = Spec.model_validate(rest)
    except ValidationError:
        document.spec = None  # too little is left to say more


def without(data: Mapping[str, Any], broken: set[tuple[Any, ...]]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The tables outside ``broken``, and where in the file the entries of its lists come from."""
    rest: dict[str, Any] = {}
    origin: dict[str, list[int]] = {}
    for key, value in data.items():
        if (key,) in broken:
            continue
        if key in LISTS and isinstance(value, list):
            kept = [index for index in range(len(value)) if (key, index) not in broken]
            rest[key] = [value[index] for index in kept]
            origin[key] = kept
        elif key in TABLES and isinstance(value, dict):
            rest[key] = {name: item for name, item in value.items() if (key, name) not in broken}
        else:
            rest[key] = value
    return rest, origin


def declared(data: Mapping[str, Any]) -> Names:
    """The names of all tables, taken from the raw data."""

    def keys(table: str) -> frozenset[str]:
        return frozenset(data[table]) if isinstance(data.get(table), dict) else frozenset()

    def named(table: str) -> list[dict[str, Any]]:
        entries = data.get(table)
        return [item for item in entries if isinstance(item, dict)] if isinstance(entries, list) else []

    sweeps = named("sweep")
    twins = [sweep["also"] for sweep in sweeps if isinstance(sweep.get("also"), dict)]
    return Names(
        **{table: keys(table) for table in TABLES},
        cases=frozenset(item["name"] for item in named("case") if isinstance(item.get("name"), str)),
        sweeps=frozenset(item["name"] for item in [*sweeps, *twins] if isinstance(item.get("name"), str)),
    )


# --- pydantic's errors in the words of the file --------------------------------------------------------------------

RANGE_ERRORS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
TYPE_NAMES = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
    "date_type": "a date",
}


def translate(details: Iterable[ErrorDetails], data: Mapping[str, Any]) -> list[Problem]:
    """One problem per place: of the alternatives of a union, the first that fits the value's own type."""
    best: dict[Loc, tuple[int, Problem]] = {}
    for detail in details:
        loc, alternatives = real_path(detail["loc"], data)
        problem = one(detail, loc)
        # an alternative that wants another type says less than one that got the type it wanted
        rank = (problem.code == "E-wrong-type") + (2 if alternatives and problem.code == "E-missing-key" else 0)
        if loc not in best or rank < best[loc][0]:
            best[loc] = (rank, problem)
    inner = {loc[:size] for loc in best for size in range(1, len(loc))}
    return [problem for loc, (rank, problem) in best.items() if not (loc in inner and problem.code == "E-wrong-type")]


def real_path(loc: tuple[Any, ...], data: Any) -> tuple[Loc, bool]:
    """``loc`` without the names of union members, which pydantic puts between the keys."""
    path: list[str | int] = []
    alternatives = False
    here = data
    if loc[-1] == "[key]":  # the key itself is wrong
        loc = loc[:-1]
    for number, step in enumerate(loc):
        inside = isinstance(here, list) and isinstance(step, int) and step < len(here)
        if inside or (isinstance(here, dict) and step in here):
            here = here[step]
        elif number == len(loc) - 1 and isinstance(here, dict) and isinstance(step, str):
            path.append(step)  # a missing key
            break
        else:
            alternatives = True
            continue
        path.append(step)
    return tuple(path), alternatives


def one(detail: ErrorDetails, loc: Loc) -> Problem:
    """The problem that one of pydantic's errors stands for."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    key = dotted(loc)
    if detail["loc"][-1] == "[key]":
        return Problem("E-unsafe-name", loc, f"{quote(loc[-1])} is no name", NAME_HINT, at_key=True)
    if kind == "extra_forbidden":
        return Problem(
            "E-unknown-key", loc, f"unknown key {quote(loc[-1])}", did_you_mean(loc[-1], keys_at(loc)), at_key=True
        )
    if kind == "missing":
        return Problem("E-missing-key", loc, f"{dotted(loc[:-1]) or 'the file'} needs the key {quote(loc[-1])}")
    if kind == "literal_error":
        allowed = [item.strip(" '") for item in str(context["expected"]).replace(" or ", ", ").split(",")]
        return Problem("E-bad-value", loc, f"{key} is {quote(value)}", did_you_mean(value, allowed))
    if kind in RANGE_ERRORS:
        words, bound = RANGE_ERRORS[kind]
        return Problem("E-out-of-range", loc, f"{key} is {quote(value)}, but must be {words} {context[bound]}")
    if kind == "finite_number":
        return Problem("E-out-of-range", loc, f"{key} is {quote(value)}, but must be finite")
    if kind in ("too_short", "string_too_short"):
        if context["min_length"] == 1:
            return Problem("E-empty", loc, f"{key} is empty")
        return Problem("E-out-of-range", loc, f"{key} needs {context['min_length']} values, low and high")
    if kind in ("too_long", "string_too_long"):
        return Problem("E-too-long", loc, f"{key} is longer than {context['max_length']}")
    if kind == "string_pattern_mismatch":
        return pattern_problem(loc, value)
    wanted = TYPE_NAMES.get(kind)
    if wanted:
        return Problem("E-wrong-type", loc, f"{key} is {quote(value)}, but must be {wanted}")
    return Problem("E-wrong-type", loc, f"{key} is {quote(value)}: {detail['msg']}")


NAME_HINT = "names are lower-case letters, digits and _, and begin with a letter"


def pattern_problem(loc: Loc, value: object) -> Problem:
    """A string that its key cannot hold."""
    key = dotted(loc)
    if loc[-1] == "adapter":
        return Problem("E-bad-adapter", loc, f"{key} is {quote(value)}", 'write "package.module:Class"')
    if loc[-1] == "capability":
        return Problem("E-bad-requirement", loc, f"{key} is {quote(value)}", 'write it like ">=9.0"')
    if "heads" in loc:
        return Problem("E-bad-value", loc, f"{key} is {quote(value)}", 'write query and KV heads like "8:1"')
    if loc[-1] == "exit":
        return Problem("E-bad-value", loc, f"{key} is {quote(value)}", 'write "SIGSEGV", "exit:3" or "cuda_error"')
    hint = NAME_HINT.replace("and _", "and -") if loc[0] == "known_failure" and loc[-1] == "id" else NAME_HINT
    return Problem("E-unsafe-name", loc, f"{key} is {quote(value)}", hint)


def keys_at(loc: Loc) -> list[str]:
    """The keys that the table around ``loc`` may have."""
    model: type[Table] | None = Spec
    for step in loc[:-1]:
        if model is not None and step in model.model_fields:
            model = table_model(model.model_fields[str(step)].annotation)
    return list(model.model_fields) if model is not None else []


def table_model(annotation: Any) -> type[Table] | None:
    """The table model somewhere inside a type such as ``dict[Name, Method]`` or ``Twin | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    for part in get_args(annotation):
        found = table_model(part)
        if found is not None:
            return found
    return None


def dotted(loc: Loc) -> str:
    """A path as a person would write it: ``sweep[0].cell[2].backends[1]``."""
    text = ""
    for step in loc:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
