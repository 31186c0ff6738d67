"""Lists of modules as quantisation tools write them: names, globs, and `re:` expressions."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
import time

REGEX = "re:"
_MOST_REPEATS = 5
_SLOW = 0.01  # seconds for one name; a list is asked some hundred thousand times
_SAMPLES = ("language_model.model.layers.59.block_sparse_moe.experts.127.w2", "a" * 60)


@dataclasses.dataclass(frozen=True)
class ModuleSet:
    """Modules, asked by the name that they have in the checkpoint.

    Attributes:
      entries: exact names, globs (`*` stands for anything, dots too) and `re:` expressions, which match from the start.
      components: an entry without `*` also means every module whose path holds it as whole components ("gate" is
        `layers.0.moe.gate`, never `gate_proj`), as the lists of the model's vendor do.

    A name is the same with and without `language_model.` or `model.language_model.` in front, on either side.
    """

    entries: tuple[str, ...] = ()
    components: bool = False

    def find(self, module: str) -> str | None:
        """The entry that holds `module`, None where none does."""
        if module not in self._found:
            self._found[module] = self._find(module)
        return self._found[module]

    def _find(self, module: str) -> str | None:
        name = canonical(module)
        if (found := self._names.get(name)) is not None:
            return found
        if self.components:
            parts = name.split(".")
            for start in range(len(parts)):
                for stop in range(start + 1, len(parts) + 1):
                    if (found := self._names.get(".".join(parts[start:stop]))) is not None:
                        return found
        if not self._patterns:
            return None
        names = [each for each in dict.fromkeys((module, *_spellings(name))) if each.startswith(self._literals)]
        if not names:
            return None  # most names: what a match begins with rules them out
        for entry, start_of_name, pattern in self._patterns:
            if any(each.startswith(start_of_name) and pattern.match(each) for each in names):
                return entry
        return None

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        return {canonical(entry): entry for entry in self.entries if not is_pattern(entry)}

    @functools.cached_property
    def _found(self) -> dict[str, str | None]:
        """Answers given before; every module is asked for several times."""
        return {}

    @functools.cached_property
    def _literals(self) -> tuple[str, ...]:
        return tuple(literal for _, literal, _ in self._patterns)

    @functools.cached_property
    def _patterns(self) -> list[tuple[str, str, re.Pattern[str]]]:
        """(entry, what every match begins with, the entry compiled)."""
        return [(entry, _literal(entry), compile_entry(entry)) for entry in self.entries if is_pattern(entry)]


def canonical(module: str) -> str:
    """A module's name without the part that a vision-language model puts in front of its text model."""
    if module.startswith("model.language_model."):
        rest = module.removeprefix("model.language_model.")
        return rest if rest.startswith(("model.", "lm_head")) else f"model.{rest}"
    return module.removeprefix("language_model.")


def is_pattern(entry: str) -> bool:
    """Whether an entry is no plain name."""
    return entry.startswith(REGEX) or any(mark in entry for mark in "*?[")


def compile_entry(entry: str) -> re.Pattern[str]:
    """The expression of a glob or a `re:` entry.

    Raises:
      ValueError: not a regular expression, or one that may take very long; the message is one line without the entry.
    """
    if not entry.startswith(REGEX):
        return re.compile(fnmatch.translate(entry))
    expression = entry.removeprefix(REGEX)
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", expression)  # escapes and classes are single characters
    repeats = plain.count("*") + plain.count("+") + plain.count("{")
    if re.search(r"\)[*+{]", plain) or repeats > _MOST_REPEATS or plain.count("?") > 4 * _MOST_REPEATS:
        raise ValueError(f"repeats a group, or more than {_MOST_REPEATS} times, which may take very long to match")
    try:
        pattern = re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    for sample in _SAMPLES:
        begin = time.perf_counter()
        pattern.match(sample)
        if time.perf_counter() - begin > _SLOW:
            begin = time.perf_counter()  # once more: the first time may have been interrupted
            pattern.match(sample)
            if time.perf_counter() - begin > _SLOW:
                raise ValueError("takes very long to match")
    return pattern


def _spellings(name: str) -> tuple[str, ...]:
    return name, f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}"


def _literal(entry: str) -> str:
    """What every match of a glob begins with; nothing is known of a regular expression."""
    if entry.startswith(REGEX):
        return ""
    found = re.match(r"[^*?\[]*", entry)
    return found[0] if found else ""
