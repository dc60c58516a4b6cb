"""One YAML file becomes the configuration, or an error that names the key, what was given and what to do.

A key nobody declared is an error that names near misses; nothing is silently ignored.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from longrein.config import Config, Section
from longrein.errors import ConfigError


def load(file: Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``file``, apply ``section.key=value`` overrides (values are YAML), and check everything.

    Raises:
        ConfigError: names the file (or the override), the key, what was given, and what to do.
    """
    tree = _read(file)
    for override in overrides:
        _override(tree, override)
    try:
        return Config.model_validate(tree, context={"base": file.resolve().parent})
    except ValidationError as error:
        raise ConfigError(_explain(file, overrides, error)) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}). Give the path of a YAML file.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8 text. Give the path of a YAML file.") from None
    try:
        tree = yaml.load(text, Loader=_Yaml)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: holds {type(tree).__name__}, expected sections such as 'model:' and 'tasks:'.")
    return tree


class _Yaml(yaml.SafeLoader):
    """YAML as people write it.

    A key given twice is refused (the plain loader keeps the last one silently), and 1e-6 is a number (for YAML 1.1 it
    is text, and only 1.0e-6 a number).
    """


_Yaml.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))


def _unique_mapping(loader: _Yaml, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", node.value[i][0].start_mark)
    return loader.construct_mapping(node, deep=True)


_Yaml.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected section.key=value, for example training.steps=3.")
    try:
        value = yaml.load(text, Loader=_Yaml)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: the value {text!r} is not valid YAML.") from None
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {key!r} holds the value {child!r}, so it has no keys below it.")
        node = child
    node[keys[-1]] = value


def _explain(file: Path, overrides: Sequence[str], error: ValidationError) -> str:
    """A line for each fault, after the file or the override that it stands in."""
    lines: dict[str, list[str]] = {}
    for detail in error.errors():
        key = ".".join(map(str, detail["loc"]))
        given = [override for override in overrides if f"{key}.".startswith(f"{override.partition('=')[0]}.")]
        lines.setdefault(f"--set {given[-1]}" if given else str(file), []).append(_explain_one(detail))
    return "\n".join(f"{where}: " + "\n".join(found) for where, found in lines.items())


def _explain_one(detail: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in detail["loc"]) or "the whole file"
    given = detail.get("input")
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r} (given {_short(given)}). {_near(detail['loc'])}"
    if detail["type"] == "missing":
        return f"key {key!r} is missing and has no default. Add it."
    message = detail["msg"].removeprefix("Value error, ")
    return f"key {key!r} was given {_short(given)}: {message[:1].lower()}{message[1:]}."


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _near(loc: tuple[Any, ...]) -> str:
    """Keys close to a mistyped one, in its own section first, then in the others."""
    section = _section_at(loc[:-1])
    here = list(section.model_fields) if section else []
    name = str(loc[-1])
    close = [".".join([*map(str, loc[:-1]), match]) for match in difflib.get_close_matches(name, here, n=3)]
    for other, info in Config.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and name in kind.model_fields:
            close.append(f"{other}.{name}")
    if close:
        return f"Did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"Keys here: {', '.join(here)}." if here else "Nothing has keys at this place."


def _section_at(loc: Sequence[Any]) -> type[Section] | None:
    section: type[Section] = Config
    for part in loc:
        info = section.model_fields.get(str(part))
        if info is None:
            return None
        kinds = [k for k in (info.annotation, *get_args(info.annotation)) if isinstance(k, type)]
        nested = next((k for k in kinds if issubclass(k, Section)), None)
        if nested is None:
            return None
        section = nested
    return section
