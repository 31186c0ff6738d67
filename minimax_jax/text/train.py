"""A small byte-level BPE tokenizer in MiniMax's form, trained on a text, for checkpoints that are made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# In the published order. The tags that parsers look for are no special tokens, so that decoded text keeps them.
PAD, TURN, EOS, UNKNOWN, BOS = "]!p~[", "]~b]", "[e~[", "]!d~[", "]~!b["
SPECIAL_TOKENS = (PAD, "<fim_pad>", TURN, EOS, UNKNOWN, BOS)
TAGS = ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")

_RESERVED = 16  # rows of the model's vocabulary for these; the published one, too, has more rows than tokens
_ALPHABET = 256

# Words with the sign before them, up to three digits, other signs, line ends, spaces.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

MIN_VOCAB_SIZE = _ALPHABET + _RESERVED


def train_tokenizer(directory: Path, text: str, *, vocab_size: int, chat_template: str) -> dict[str, int]:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja; the same text gives the same bytes.

    Returns:
      Ids of the special tokens and tags; every id is below `vocab_size`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - _RESERVED,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAGS])
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ids = {token: vocabulary[token] for token in (*SPECIAL_TOKENS, *TAGS)}

    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(ids), indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return ids


def _tokenizer_config(ids: dict[str, int]) -> dict[str, Any]:
    """In the published spelling; the class named there is not what reads tokenizer.json."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(id_): {"content": token, **plain, "special": token in SPECIAL_TOKENS} for token, id_ in ids.items()
        },
        "add_prefix_space": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": 40960000,
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": UNKNOWN,
    }
