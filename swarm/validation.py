"""What people write, read into models: YAML mappings, and errors about their keys and values in plain words.

Invariant: an error is one line that names the text and every wrong key; it never repeats a value that may be a secret.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from swarm.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)


_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error: the first one would count for nothing, without a word. Of
    several merges (``<<``) each counts."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: Any = super().compose_mapping_node(anchor)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            once = isinstance(key, yaml.ScalarNode) and key.tag != _MERGE
            name = (key.tag, key.value) if once else None
            if name in keys:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            keys |= {name} if name else set()
        return node


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """The mapping at the top of YAML (or JSON) text; empty for text without content.

    Raises:
        ConfigError: the text is not YAML, or not a mapping; ``where`` names it.
    """
    try:
        data: Any = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # ValueError: a date that does not exist, say
        for mark in (getattr(exc, "context_mark", None), getattr(exc, "problem_mark", None)):
            if mark is not None:
                # it quotes the line, which may hold a secret
                mark.buffer = None
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(data, dict | None):
        raise ConfigError(f"{where} must be a mapping, got {type(data).__name__}")
    return cast("dict[str, Any]", data or {})


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named; ``what`` says what it is.

    Raises:
        ConfigError: it is missing or no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the {what} {path}: {getattr(exc, 'strerror', None) or exc}") from exc


def path_in(folder: Path, path: str) -> Path:
    """A path that stands in a file of ``folder``: relative to it, and ``~`` is the home."""
    # not Path.expanduser, which fails for a user that there is not
    return folder / os.path.expanduser(path)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """:func:`parse_mapping` of the file at ``path``; raises as :func:`read_text` does."""
    return parse_mapping(read_text(path, what), f"the {what} {path}")


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        # what is asked for is added at its end
        if parts.port != 0 and parts.hostname and not {"?", "#"} & set(url):
            return url
    except ValueError:
        pass
    raise ValueError("must be an address like http://127.0.0.1:8001/v1, without a query")


#: Of a server that is asked over HTTP, such as an OpenAI-compatible one.
BaseUrl = Annotated[str, Field(pattern=r"^https?://"), AfterValidator(_address)]


def environment_key(variable: str, whose: str) -> str:
    """The key in the environment variable of that name; empty where none is named.

    Raises:
        ConfigError: the variable is not set, or is empty.
    """
    # a file of secrets ends in a line's end, which no header has
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"{whose} needs its key in the environment as {variable}")
    return key


def validated(model: type[ModelT], data: Mapping[str, Any], where: str) -> ModelT:
    """The ``model`` with the fields ``data``.

    Raises:
        ConfigError: a misspelt key or a value out of range; one line names ``where`` and each.
    """
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise describe_validation(exc, where, model) from exc


def describe_validation(exc: ValidationError, where: str, model: type[BaseModel] | None = None) -> ConfigError:
    """One-line error naming every wrong key of ``where`` and what is wrong with it; ``model`` knows the right ones."""
    problems: dict[str, list[str]] = {}
    for error in exc.errors():
        key, words = _problem(error, model)
        problems.setdefault(key, []).append(words)
    lines = [f"{key}: {_one_of(words)}" if key else "; ".join(words) for key, words in problems.items()]
    return ConfigError(f"{where}: {'; '.join(lines)}")


def _one_of(words: list[str]) -> str:
    """What is wrong with a value that each of several kinds refuses."""
    wanted, _, value = words[-1].partition(", not ")
    kinds = [*(word.partition(", not ")[0] for word in words[:-1]), wanted]
    joined = " or ".join(dict.fromkeys([kinds[0], *(word.removeprefix("must be ") for word in kinds[1:])]))
    return f"{joined}, not {value}" if value else joined


def _problem(error: ErrorDetails, model: type[BaseModel] | None) -> tuple[str, str]:
    """The dotted key, without the names that pydantic gives to kinds of values, and what is wrong with it."""
    path = [part for number, part in enumerate(error["loc"]) if not number or not _is_kind(part)]
    if error["type"] != "extra_forbidden":
        return ".".join(map(str, path)), in_plain_words(error)
    *outer, last = map(str, path)
    for name in (part for part in path[:-1] if isinstance(part, str)):
        model = _model_of(model.model_fields[name].annotation) if model and name in model.model_fields else None
    keys = model.model_fields if model is not None else ()
    initials = "".join(part[:1] for part in last.split("_"))  # learning_rate is lr here
    meant = difflib.get_close_matches(last, keys, n=1, cutoff=0.7) or [key for key in keys if key == initials]
    hint = f" (did you mean {meant[0]!r}?)" if meant else ""
    return ".".join(outer), f"unknown key {last!r}{hint}"


def _is_kind(part: int | str) -> bool:
    kinds = ("str", "int", "float", "bool", "dict", "list")
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-") or part in kinds)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The first model among the kinds of values that an annotation allows, in lists too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for kind in get_args(annotation) if (model := _model_of(kind)) is not None), None)


#: Kinds of errors whose input is a plain value; others may be about a secret, which is not repeated.
_TELLS_INPUT = ("int_", "float_", "bool_", "greater_", "less_", "literal_", "finite_")
_LONGEST_INPUT = 40
_WORDS = {
    "a valid ": "a ",
    "a integer": "a whole number",
    "a dictionary": "a mapping",
    "a tuple": "a list",
    "a boolean": "true or false",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def in_plain_words(error: ErrorDetails) -> str:
    """What is wrong with one value, without the words of pydantic."""
    kind, message = error["type"], error["msg"]
    if kind == "missing":
        return "is required"
    if kind in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    _, should, wanted = message.partition(" should ")
    if not should:
        return message
    if kind != "literal_error":  # which lists all that it may be
        # "Input should be a valid integer, unable to parse string as an integer"
        wanted = wanted.partition(", ")[0]
    wanted = re.sub(r" or instance of \w+| after validation", "", wanted)
    for theirs, ours in _WORDS.items():
        wanted = wanted.replace(theirs, ours)
    value = repr(error["input"])
    tells = kind.startswith(_TELLS_INPUT) and len(value) <= _LONGEST_INPUT
    return f"must {wanted}" + (f", not {value}" if tells else "")
