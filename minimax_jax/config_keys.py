"""Reading one JSON object of a checkpoint's settings: typed values, refusals by name.

`null` and an absent key mean the same everywhere, and keys with a leading underscore are a writer's private notes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from minimax_jax.errors import ConfigError


def show(value: object) -> str:
    """A value as an error message shows it: one line, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a ConfigError of one line that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object_without_contradictions)
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a checkpoint directory with its {path.name}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not usable JSON: nested too deeply") from None
    except ValueError as error:  # a syntax error, an encoding error, or a number of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {show(data)}")
    return data


@dataclasses.dataclass(frozen=True)
class Section:
    """A JSON object and how its keys are named in messages: `source: prefix.key`.

    Every reader returns None for a key that is absent or null.
    """

    data: Mapping[str, Any]
    source: str
    prefix: str = ""

    def name(self, key: str) -> str:
        """The key with the objects around it; odd characters escaped, so that a message stays one line."""
        return self.prefix + (key if key.isidentifier() else show(key))

    def error(self, message: str) -> ConfigError:
        """The error to raise, with the file in front."""
        return ConfigError(f"{self.source}: {message}")

    def get(self, key: str) -> Any:
        """The raw value."""
        return self.data.get(key)

    def section(self, key: str) -> Section | None:
        """A nested object."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{self.name(key)} {show(value)} is not an object")
        return Section(value, self.source, f"{self.name(key)}.")

    def integer(self, key: str, minimum: int = 1) -> int | None:
        """A whole number; true and 3.0 are none."""
        value = self.get(key)
        if value is None or (is_int(value) and value >= minimum):
            return value
        raise self.error(f"{self.name(key)} {show(value)} is not a whole number of at least {minimum}")

    def integers(self, *keys: str) -> list[tuple[str, int]]:
        """The keys that are there, by name, each with its whole number of at least 1."""
        return [(self.name(key), value) for key in keys if (value := self.integer(key)) is not None]

    def number(self, key: str, *, allow_zero: bool = False, maximum: float = math.inf) -> float | None:
        """A finite positive number."""
        value = self.get(key)
        if value is None:
            return None
        if is_finite_number(value) and (value > 0 or (allow_zero and value == 0)) and value <= maximum:
            return float(value)
        bounds = ("at least 0" if allow_zero else "above 0") + ("" if maximum == math.inf else f", at most {maximum}")
        raise self.error(f"{self.name(key)} {show(value)} is not a finite number ({bounds})")

    def boolean(self, key: str) -> bool | None:
        """true or false."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.error(f"{self.name(key)} {show(value)} is neither true nor false")

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent is empty."""
        value = self.get(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.error(f"{self.name(key)} {show(value)} is not a list of strings")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, in order, each once; absent is empty."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_int(token) and token >= 0 for token in ids):
            raise self.error(f"{self.name(key)} {show(value)} is neither a token id nor a list of token ids")
        return tuple(dict.fromkeys(ids))

    def check_fixed(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse by name a key that would change the computation."""
        for key, allowed in fixed.items():
            value = self.get(key)
            if value is not None and not any(_same(value, choice) for choice in allowed):
                expected = "null" if allowed[0] is None else show(allowed[0])
                raise self.error(f"{self.name(key)} {show(value)} is not supported; expected {expected}")

    def check_per_layer(self, table: Mapping[str, Any], layers: int) -> None:
        """Refuse a per-layer list of another length, or with a layer of another kind."""
        for key, expected in table.items():
            value = self.get(key)
            if value is None or _same(value, expected):
                continue
            if not isinstance(value, list):
                raise self.error(
                    f"{self.name(key)} {show(value)} is not a list of {show(expected)}, one for each layer"
                )
            if len(value) != layers:
                raise self.error(f"{self.name(key)} has {len(value)} entries, but num_hidden_layers is {layers}")
            for layer, item in enumerate(value):
                if not _same(item, expected):
                    raise self.error(
                        f"{self.name(key)} holds {show(item)} for layer {layer}; only {show(expected)} is supported"
                    )

    def check_unknown(self, *known: Collection[str]) -> None:
        """Refuse by name the keys that no table knows."""
        unknown = [
            self.name(key)
            for key, value in self.data.items()
            if value is not None and not key.startswith("_") and not any(key in names for names in known)
        ]
        if unknown:
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise self.error(
                f"unknown key {', '.join(unknown[:5])}{more}: it may change what the model computes; "
                "remove it from the file if it does not"
            )


def agreed(section: Section, found: Sequence[tuple[str, Any]]) -> Any:
    """The one value under all its spellings, given as (name, value); None where there is none."""
    for label, value in found[1:]:
        if value != found[0][1]:
            raise section.error(f"{found[0][0]} {found[0][1]} and {label} {value} contradict each other; keep one")
    return found[0][1] if found else None


def is_int(value: object) -> TypeGuard[int]:
    """A whole number; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite_number(value: object) -> bool:
    """An int or float that a float holds; a bool is none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _same(value: object, choice: object) -> bool:
    """Equal, where true is not 1."""
    return isinstance(value, bool) == isinstance(choice, bool) and value == choice


def _object_without_contradictions(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice with two values is refused rather than decided by its order."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and not _same(result[key], value):
            raise ConfigError(f"key {show(key)} stands twice, as {show(result[key])} and {show(value)}")
        result[key] = value
    return result
