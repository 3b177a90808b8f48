"""The tokenizer of a downloaded model: a tokenizer.json, and the token that ends a document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config.files import read_json
from jaxdist.errors import DataError, os_errors_as
from jaxdist.interchange.source import TOKENIZER, Source
from jaxdist.types import JsonObject

ENDS = ("<|endoftext|>", "[SEP]")
"""The tokens that end a document in tokenizers of decoders, and of bert."""
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "smollm": "digits",
    "llama-bpe": rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_LETTERS}|\p{{N}}|{_REST}",
}
"""The pattern by which a tokenizer splits text before it joins bytes, by the pattern's name in GGUF
files."""
_CONTROL = 3


def tokenizer_section(source: Source, file: Path) -> JsonObject:
    """Return the section `data.tokenizer` of a config for the tokenizer.json `file`.

    Raises:
      DataError: the tokenizer has more tokens than the model, or cannot be read.
    """
    failed, again = f"{file} is not a tokenizer.json", "download the file again"
    with os_errors_as(DataError, failed, again, also=(ValueError, KeyError, TypeError)):
        content: Any = read_json(file)
        vocab: Any = content["model"]["vocab"]
        added = {one["id"]: one["content"] for one in content.get("added_tokens") or ()}
    pairs = vocab.items() if isinstance(vocab, dict) else ((v[0], i) for i, v in enumerate(vocab))
    tokens = {number: token for token, number in pairs} | added
    if max(tokens, default=0) >= source.inputs.vocab_size:
        raise DataError(
            f"{file} has tokens up to {max(tokens)}, but the model of {source.path} has "
            f"{source.inputs.vocab_size}: give the model its own tokenizer"
        )
    ids = (_first(source.config.get(f"{which}_token_id")) for which in ("bos", "eos"))
    ends = [token for token in ENDS if token in tokens.values()]
    named = ends or [tokens[i] for i in ids if i in tokens]
    # If an added token would exceed the model's vocabulary, the token with the largest number ends
    # documents.
    if not named and max(tokens, default=0) + 1 >= source.inputs.vocab_size:
        named = [tokens[max(tokens)]]
    end = {"end_of_document": named[0]} if named else {}
    return {"type": "bpe", "file": str(file), **end, "vocab_size": source.inputs.vocab_size}


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list) and found else found


def from_gguf(path: Path, metadata: Mapping[str, Any]) -> str:
    """Return the tokenizer of a GGUF file as the content of a tokenizer.json.

    Raises:
      DataError: the kind of the tokenizer, or the rule by which it splits text, is unknown to
          jaxdist.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in SPLITS:
        raise DataError(
            f"{path}: the tokenizer is of type {kind!r} and splits text by the rule {pre!r}, but "
            "jaxdist reads only type 'gpt2' (byte pairs) with one of the rules "
            f"{', '.join(SPLITS)}. Put the model's {TOKENIZER} next to the file"
        )
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    split = SPLITS[pre]
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (None, "digits"))
    first = [] if split is None else [pre_tokenizers.Digits(individual_digits=True)]
    if split not in (None, "digits"):
        first = [pre_tokenizers.Split(Regex(split), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, own])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    # `zip` is not strict: a file without kinds of tokens has no special tokens.
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer.to_str()


def pre_of(content: Mapping[str, Any]) -> str | None:
    """Return the name in `SPLITS` of a tokenizer.json's pattern, or None for any other pattern.

    The result is also None if the tokenizer adds a space before the text (`add_prefix_space`). For
    byte pairs, llama.cpp never adds this space, whatever the value of the key `add_space_prefix` in
    a GGUF file.
    """
    given = content.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers", [given])
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        return None
    # The last step converts text to bytes. By default, it also splits the text by gpt-2's pattern.
    cuts_again = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and cuts_again:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and cuts_again:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not cuts_again:
        split = steps[0]
        if split.get("behavior", "Isolated") != "Isolated" or split.get("invert"):
            return None
        names = {text: name for name, text in SPLITS.items() if text not in (None, "digits")}
        return names.get(split["pattern"].get("Regex"))
    return None


def tokenizer_config(metadata: Mapping[str, Any]) -> str:
    """Return the content of a tokenizer_config.json for the tokenizer of a GGUF file."""
    tokens = metadata["tokenizer.ggml.tokens"]
    found: JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for which in ("bos", "eos", "unk", "pad"):
        number = metadata.get(f"tokenizer.ggml.{'padding' if which == 'pad' else which}_token_id")
        if number is None and which == "unk":
            number = metadata.get("tokenizer.ggml.unknown_token_id")
        if number is not None:
            found[f"{which}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    return json.dumps(found | ({} if template is None else {"chat_template": template}), indent=1)
