"""The tokenizer of a checkpoint directory: text to ids, ids to text, messages to a prompt. Free of JAX."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minimax_jax.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

# Any of these says that the directory means to have a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")


def load_tokenizer(directory: Path | str) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, None when the directory has none.

    Raises:
      CheckpointError: there are tokenizer files that cannot be read.
    """
    directory = Path(directory)
    found = [name for name in _TOKENIZER_FILES if (directory / name).exists()]
    if not found:
        return None
    if "tokenizer.json" not in found:
        raise CheckpointError(
            f"{directory} has {' and '.join(found)} but no tokenizer.json; fetch it, or remove the others to load the "
            "model without a tokenizer"
        )
    try:
        with _quiet_transformers():
            from transformers import PreTrainedTokenizerFast

            # Reads tokenizer.json as it is; the class that tokenizer_config.json names may split words differently.
            backend = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the libraries below raise bare Exceptions for a damaged file
        raise CheckpointError(f"tokenizer files in {directory} cannot be read: {one_line(error)}") from error
    return Tokenizer(backend, str(directory))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for; a model with more rows than ids is fine.

    Raises:
      CheckpointError: names both numbers.
    """
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer in {tokenizer.source} has ids up to {tokenizer.vocab_size - 1} "
            f"({tokenizer.token(tokenizer.vocab_size - 1)!r}), the model's vocab_size is {vocab_size}: they are not of "
            "one model"
        )


class Tokenizer:
    """What this package needs of a Hugging Face tokenizer.

    Attributes:
      source: where it came from, for messages.
      vocab_size: highest id plus one, added tokens included.
      eos_token_ids: the tokenizer's own end-of-sequence id; generation_config.json may name others.
    """

    def __init__(self, backend: Any, source: str) -> None:
        self._backend = backend
        self.source = source
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        eos = backend.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (int(eos),)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(getattr(self._backend, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Special tokens spelled in it become those tokens; none is added.

        Raises:
          RequestError: the text is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode at character {error.start}; expected UTF-8 text"
            ) from None
        ids = self._backend.encode(text, add_special_tokens=False, padding=False, truncation=False, verbose=False)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; an id that the tokenizer does not know is no text."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token(self, id_: int) -> str | None:
        """One token as the vocabulary spells it, None for an id without a token."""
        token: str | None = self._backend.convert_ids_to_tokens(id_)
        return token

    def token_id(self, token: str) -> int | None:
        """Id of one token as the vocabulary spells it."""
        id_: int | None = self._backend.get_vocab().get(token)
        return id_

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Prompt ids of a conversation by the checkpoint's own chat template, which begins with its own BOS.

        Args:
          messages: OpenAI form; arguments of tool calls as an object, or as the JSON string that servers exchange.
          tools: OpenAI form.
          add_generation_prompt: end with the beginning of the assistant's turn.
          variables: whatever else the template reads, such as current_date.

        Raises:
          RequestError: there is no template, or it cannot render these messages.
        """
        return _flat_ids(self._render(messages, tools, add_generation_prompt, variables, tokenize=True))

    def render_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text that `apply_chat_template` tokenizes."""
        text: str = self._render(messages, tools, add_generation_prompt, variables, tokenize=False)
        return text

    def _render(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool, variables: Any, *, tokenize: bool
    ) -> Any:
        if not self.has_chat_template:
            raise RequestError(f"{self.source} has no chat template; add chat_template.jinja or pass a plain prompt")
        if not messages:
            raise RequestError("the conversation is empty; it needs at least one message")
        prepared = [_with_argument_objects(message) for message in messages]
        try:
            with _quiet_transformers():
                return self._backend.apply_chat_template(
                    prepared,
                    tools=None if not tools else [dict(tool) for tool in tools],
                    add_generation_prompt=add_generation_prompt,
                    tokenize=tokenize,
                    **variables,
                )
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template of {self.source} cannot render this: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks, or its type when it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _flat_ids(result: Any) -> list[int]:
    """Ids out of what `apply_chat_template` returned: a list, or since transformers 5 a mapping (not always a dict)."""
    ids = result["input_ids"] if isinstance(result, Mapping) else result
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if len(ids) == 1 and not isinstance(ids[0], int):  # a batch of one
        ids = ids[0]
    return [int(i) for i in ids]


def _with_argument_objects(message: Message) -> dict[str, Any]:
    """A copy in which the arguments of every tool call are an object: templates iterate over them."""
    copy = dict(message)
    if not copy.get("tool_calls"):
        return copy
    calls = []
    for call in copy["tool_calls"]:
        holder = "function" if isinstance(call.get("function"), Mapping) else None
        function = dict(call["function"]) if holder else dict(call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parse_arguments(function["arguments"], function.get("name"))
        calls.append({**call, "function": function} if holder else function)
    copy["tool_calls"] = calls
    return copy


def _parse_arguments(text: str, name: Any) -> dict[str, Any]:
    try:
        arguments = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise RequestError(
            f"arguments of the call of {name!r} are not JSON ({one_line(error)}): {text[:80]!r}"
        ) from None
    if not isinstance(arguments, dict):
        raise RequestError(f"arguments of the call of {name!r} are {text[:80]!r}; expected a JSON object")
    return arguments


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' advice (no PyTorch found, class names, lengths) from the user; errors still raise."""
    library = logging.getLogger("transformers")
    library.addFilter(_is_error)  # importing it sets the level, but leaves filters alone
    try:
        import transformers  # noqa: F401
    finally:
        library.removeFilter(_is_error)
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
