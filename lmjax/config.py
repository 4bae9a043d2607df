"""Configuration: a `configs/<stage>/<name>.py` file → overrides → one frozen, typed dataclass.

A config file defines `get_config()`, which returns an `ml_collections.ConfigDict`; the command line overrides a field by
`--config.section.field=value`. Both meet here, once, in `build`: an unknown key names the nearest known one, a wrong type
or an impossible combination (a dataclass's `__post_init__`) is a `UserError`. The code never sees a ConfigDict.
"""

import ast
import dataclasses
import difflib
import json
import os
import re
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lmjax.errors import UserError

T = TypeVar("T")
MISSING = dataclasses.MISSING


def free(default: Any) -> Any:
    """A field that may differ between a run and its resumption: it changes speed, place or output, never the result."""
    return dataclasses.field(default=default, metadata={"free": True})


@dataclasses.dataclass(frozen=True)
class Text:
    """A value that came from the command line: its type is the field's, not yet known where it was written."""

    text: str


# ---------------------------------------------------------------------------------------------------------------- reading


def load(cls: type[T], path: str, overrides: Sequence[str] = ()) -> T:
    """Reads a config file into `cls`.

    Args:
      cls: a frozen dataclass.
      path: a Python file that defines `get_config()`.
      overrides: `section.field=value` strings, later ones win.
    """
    values = from_file(path)
    for override in overrides:
        set_override(values, override)
    return build(cls, values)


def from_file(path: str) -> dict[str, Any]:
    """The nested dict that the file's `get_config()` returns."""
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, list_configs(os.path.dirname(path)), n=1, cutoff=0)
        raise UserError(f"no config file {path!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    namespace: dict[str, Any] = {"__file__": os.path.abspath(path), "__name__": "lmjax_config"}
    with open(path, "rb") as file:
        source = file.read()
    try:
        exec(compile(source, path, "exec"), namespace)
        if not callable(namespace.get("get_config")):
            raise UserError(f"{path} defines no get_config()")
        config = plain(namespace["get_config"]())
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}") from error
    except UserError:
        raise
    except Exception as error:  # the file is the user's own code: whatever it raises is theirs to mend
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        message = " ".join(str(error).split())
        raise UserError(f"{path}:{lines[-1] if lines else 1}: {type(error).__name__}: {message}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: get_config() must return a ConfigDict, not {type(config).__name__}")
    return config


def plain(value: Any) -> Any:
    """ConfigDicts and dicts, at any depth, as dicts."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def list_configs(folder: str) -> list[str]:
    """Config files beside a mistyped one, for did-you-mean."""
    if not os.path.isdir(folder or "."):
        return []
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder or ".")) if name.endswith(".py")]


def set_override(values: dict[str, Any], override: str) -> None:
    """Writes `section.field=value` into the nested dict, as `Text` for `build` to type."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form section.field=value")
    node = values
    *sections, leaf = key.split(".")
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise UserError(f"config.{key}: {section!r} is a value, not a section")
        node = child
    node[leaf] = Text(text)


# --------------------------------------------------------------------------------------------------------------- building


def build(cls: type[T], values: Mapping[str, Any], name: str = "config") -> T:
    """A frozen dataclass from nested values; every mistake is a `UserError` that names the field."""
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise UserError(f"{name}.{key}: no such field{did_you_mean(key, known)}")
    arguments = {}
    for field in known.values():
        if field.name in values:
            arguments[field.name] = convert(values[field.name], hints[field.name], f"{name}.{field.name}")
        elif field.default is not MISSING or field.default_factory is not MISSING:
            continue
        elif dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = build(hints[field.name], {}, f"{name}.{field.name}")
        else:
            raise UserError(f"{name}.{field.name} must be given ({describe(hints[field.name])})")
    return cls(**arguments)


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest word, or the list when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def convert(value: Any, hint: Any, name: str) -> Any:
    """`value` as the type `hint`, or a `UserError`. An int serves as a float; nothing else is coerced."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return convert_optional(value, parts, name)
    if origin is typing.Literal:
        word = value.text if isinstance(value, Text) else value
        for choice in parts:
            if word == choice or (isinstance(value, Text) and word == str(choice)):
                return choice
        raise UserError(f"{name}={word!r}{did_you_mean(str(word), [str(choice) for choice in parts])}")
    if hint is str and isinstance(value, Text):
        return value.text
    if isinstance(value, Text):
        value = parse(value.text, hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, name)
    if dataclasses.is_dataclass(hint) and isinstance(value, hint):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(item, parts[0], f"{name}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {str(key): convert(item, parts[1], f"{name}.{key}") for key, item in value.items()}
    if hint is float and type(value) is int and abs(value) < 1 << 1023:  # what a float holds
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    shown = value.text if isinstance(value, Text) else value
    raise UserError(f"{name}={shown!r} must be {describe(hint)}")


def convert_optional(value: Any, parts: tuple, name: str) -> Any:
    """`X | None`: `None` (or the text "none") is None, everything else is an X."""
    if value is None or (isinstance(value, Text) and value.text.lower() == "none"):
        return None
    (inner,) = [part for part in parts if part is not type(None)]
    return convert(value, inner, name)


def parse(text: str, hint: Any) -> Any:
    """A command-line text as a Python value; a text that is none stays a `Text`, and the caller names the field."""
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if typing.get_origin(hint) is tuple and not text.startswith(("(", "[")):
        return [Text(part) for part in text.split(",") if part]
    try:
        value = ast.literal_eval(text.replace("_", "") if re.fullmatch(r"[\d_.eE+-]+", text) else text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Text(text)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e6 on a command line means a million
    return value


def describe(hint: Any) -> str:
    """A type as a user would say it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(describe(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
    return names.get(hint, str(hint).replace("typing.", "") if typing.get_origin(hint) else f"a {hint.__name__}")


def need(condition: bool, message: str) -> None:
    """Raises `UserError(message)` unless the condition holds; for `__post_init__` of config dataclasses."""
    if not condition:
        raise UserError(message)


# ---------------------------------------------------------------------------------------------------- keeping and comparing


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values; `build` reads it back equal."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict → {"section.field": value}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclasses.dataclass(frozen=True)
class Change:
    """One field that differs between two configs."""

    key: str
    old: Any
    new: Any
    free: bool  # may differ without changing the result of the run

    def __str__(self) -> str:
        return f"config.{self.key}: {self.old!r} → {self.new!r}"


def diff(cls: type, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every field that differs between two dumped configs of `cls`, in order of its name."""
    old, new = flatten(old), flatten(new)
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return [Change(key, old.get(key), new.get(key), is_free(cls, key)) for key in keys]


def is_free(cls: type, key: str) -> bool:
    """Whether the field at `section.field` is marked `free` (or stands in a section that is)."""
    for part in key.split("."):
        fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
        if part not in fields:
            return False  # a key of a dict field, or a field that this version no longer has
        if fields[part].metadata.get("free"):
            return True
        cls = typing.get_type_hints(cls)[part]
    return False
