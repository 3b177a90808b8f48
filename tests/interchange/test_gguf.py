"""GGUF files: float and quantized tensors are those of the safetensors, and damage is named."""

import json
import struct

import numpy as np
import pytest
from rich.console import Console

from benchmarks.models.drawn import CONFIGS, VOCAB, drawn, write_drawn
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model
from jaxdist.errors import ConfigError, DataError, JaxdistError
from jaxdist.interchange.families import architecture, family_of
from jaxdist.interchange.gguf_files import NAMES, read, rows
from jaxdist.interchange.layouts import WeightLayout
from jaxdist.interchange.source import leaves_of, open_source
from jaxdist.interchange.tokenizers import SPLITS
from jaxdist.interchange.write import assembled, pieces_of
from jaxdist.interchange.write_gguf import gguf_rows, tokenizer_metadata, write_gguf
from jaxdist.models.functional import functional
from jaxdist.models.gpt import GptConfig
from jaxdist.trees import flatten_with_names

QUIET = Console(quiet=True)
KINDS = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key, value):
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    kind, form = (6, "f") if isinstance(value, float) else (4, "I")
    return text(key) + struct.pack(f"<I{form}", kind, value)


def quantized(array, kind):
    """Bytes of an array, and the array that they stand for."""
    if kind in ("F32", "F16"):
        held = array.astype({"F32": np.float32, "F16": np.float16}[kind])
        return held.tobytes(), held.astype(np.float32)
    blocks, least = array.reshape(-1, 32), array.reshape(-1, 32).min(1, keepdims=True)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        q = np.round(blocks / scale.astype(np.float32)).astype(np.int8)
        raw = np.concatenate([scale.view(np.uint8), q.view(np.uint8)], 1)
        return raw.tobytes(), (q * scale.astype(np.float32)).reshape(array.shape)
    scale = ((blocks.max(1, keepdims=True) - least) / 15).astype(np.float16)
    least = least.astype(np.float16)
    wide, low = scale.astype(np.float32), least.astype(np.float32)
    q = np.clip(np.round((blocks - low) / wide), 0, 15).astype(np.uint8)
    packed = q[:, :16] | (q[:, 16:] << 4)
    raw = np.concatenate([scale.view(np.uint8), least.view(np.uint8), packed], 1)
    return raw.tobytes(), (q * wide + low).reshape(array.shape)


def drawn_file(path, name, kind):
    """A drawn model as a GGUF file; returns each parameter as the file's types have it."""
    config = CONFIGS[name]
    family = family_of(config, where=name)
    model_config = GptConfig.model_validate(family.model(config))
    model = functional(lambda rngs: model_config.build(rngs, vocab_size=VOCAB))
    flat = flatten_with_names(model.params)
    named = [(n, zip(s.shape, model.dims[n], strict=True)) for n, s in flat]
    shapes = {n: tuple(VOCAB if d == "vocab" else s for s, d in dims) for n, dims in named}
    joined = {"blk.0.attn_qkv.weight": None} if family.name == "gpt2" else {}
    pieces = pieces_of(shapes, model.stacked, rows(family, joined))
    inner = {n: s[1:] if n in model.stacked else s for n, s in shapes.items()}
    arch, own = family.name, architecture(model_config)
    meta = {
        "general.architecture": arch,
        f"{arch}.block_count": own["layers"],
        f"{arch}.embedding_length": own["embed"],
        f"{arch}.feed_forward_length": own["mlp"],
        f"{arch}.attention.head_count": own["heads"],
        f"{arch}.attention.head_count_kv": own["kv_heads"],
        f"{arch}.attention.key_length": own["head_size"],
        f"{arch}.attention.layer_norm_rms_epsilon": own["norm_epsilon"],
        f"{arch}.attention.layer_norm_epsilon": own["norm_epsilon"],
        f"{arch}.rope.freq_base": own["rope_theta"],
        f"{arch}.context_length": own["positions"] or 1024,
    }
    head, data, right = b"", b"", {}
    for tensor, parts in pieces.items():
        value = assembled(parts, lambda n, i: drawn(n, i, inner[n]), np.dtype("float32"))
        used = "F32" if value.ndim == 1 or value.shape[-1] % 32 else kind
        raw, held = quantized(value, used)
        dims = struct.pack(f"<{value.ndim}Q", *value.shape[::-1])
        head += text(tensor) + struct.pack("<I", value.ndim) + dims
        head += struct.pack("<IQ", KINDS[used], len(data))
        data += raw + b"\0" * (-len(raw) % 32)
        for part in parts:
            right[part.name, part.layer] = part.layout.read(held, part.shape)
    raw = struct.pack("<4sIQQ", b"GGUF", 3, len(pieces), len(meta))
    raw += b"".join(pair(*one) for one in meta.items()) + head
    path.write_bytes(raw + b"\0" * (-len(raw) % 32) + data)
    return right, model_config


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "Q4_1"), ("llama", "Q8_0"), ("gpt2", "F16"), ("qwen3", "F32")]
)
@pytest.mark.every(3)
def test_a_gguf_file_is_the_model_that_was_written(name, kind, tmp_path):
    """Heads of architecture llama, whose pairs are side by side in the file, are ours again."""
    right, config = drawn_file(tmp_path / "m.gguf", name, kind)
    source = open_source(tmp_path / "m.gguf")
    found = GptConfig.model_validate(source.family.model(source.config))
    assert architecture(found) == architecture(config)
    model = functional(lambda rngs: found.build(rngs, vocab_size=VOCAB))
    for leaf in leaves_of(source, model):
        value = leaf.block((slice(None),) * len(leaf.shape))
        for i in range(len(leaf.tensors)):
            inside = tuple(slice(0, n) for n in leaf.filled[leaf.stacked :])
            held = value[i] if leaf.stacked else value
            wanted = right[leaf.name, i if leaf.stacked else None]
            np.testing.assert_array_equal(held[inside], wanted, err_msg=leaf.name)


def test_a_file_without_a_tokenizer_is_imported_without_one(tmp_path):
    drawn_file(tmp_path / "m.gguf", "qwen3", "F32")
    data = f"data={{type: synthetic, kind: tokens, vocab_size: {VOCAB}, window: 16}}"
    import_model(tmp_path / "m.gguf", tmp_path / "run", [data], console=QUIET)
    assert [file.name for file in (tmp_path / "run" / "source").iterdir()] == ["config.json"]


def test_pairs_side_by_side_are_not_our_halves(tmp_path):
    """Converters write the halves of a head in turn, (H, 2, d/2) as (H, d/2, 2); we read halves."""
    family, name = family_of(CONFIGS["llama"], where=""), "blocks/attention/query"
    theirs = np.arange(2 * 6 * 5).reshape(12, 5)
    converted = theirs.reshape(2, 2, 3, 5).swapaxes(1, 2).reshape(12, 5)
    read = WeightLayout(rows(family, {})[name].layout).read(converted, (5, 2, 6))
    right = WeightLayout(family.rows[name].layout).read(theirs, (5, 2, 6))
    np.testing.assert_array_equal(read, right)
    assert set(NAMES) >= set(family.rows)


@pytest.mark.parametrize(
    "name",
    [pytest.param("gpt2", marks=pytest.mark.full), pytest.param("llama", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_an_exported_file_is_the_model_that_was_imported(name, tmp_path):
    write_drawn(name, tmp_path / "given")
    small = ["data.examples=16", "data.heldout_examples=8", "data.window=16"]
    run, out = tmp_path / "run", tmp_path / "out.gguf"
    import_model(tmp_path / "given", run, small, console=QUIET)
    export_model(run, out, gguf=True, console=QUIET)
    source, given = open_source(out), open_source(tmp_path / "given")
    made = GptConfig.model_validate(source.family.model(source.config))
    own = GptConfig.model_validate(given.family.model(given.config))
    assert architecture(made) == architecture(own)
    # Without it transformers takes the number of tokens of a llama.
    assert read(out).metadata[f"{source.family.name}.vocab_size"] == VOCAB
    model = functional(lambda rngs: made.build(rngs, vocab_size=VOCAB))
    for one, other in zip(leaves_of(source, model), leaves_of(given, model), strict=True):
        whole = (slice(None),) * len(one.shape)
        np.testing.assert_array_equal(one.block(whole), other.block(whole), err_msg=one.name)
    with pytest.raises(JaxdistError, match="exists already: name another file"):
        export_model(run, out, gguf=True, console=QUIET)


def test_what_a_gguf_file_cannot_name_is_refused():
    for name, words in (("mistral", "cannot write mistral"), ("llama3", "rope_scaling")):
        family = family_of(CONFIGS[name], where=name)
        model = GptConfig.model_validate(family.model(CONFIGS[name]))
        with pytest.raises(JaxdistError, match=words):
            gguf_rows(family, model)


def test_damaged_files_are_one_message_each(tmp_path):
    file = tmp_path / "m.gguf"
    drawn_file(file, "llama", "F32")
    raw = file.read_bytes()
    at = raw.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    cases = [
        (raw[:-64], r"is truncated: '.*' ends at byte [\d,]+ of [\d,]+"),
        (raw[:60], r"is a truncated or malformed GGUF file"),
        (raw[:24] + b"\xff" * 8 + raw[32:], r"is a truncated or malformed GGUF file"),
        (
            raw[:4] + struct.pack("<I", 1) + raw[8:],
            r"is in version 1 of GGUF, and jaxdist reads the versions 2 and 3",
        ),
        (raw[:at] + struct.pack("<I", 19) + raw[at + 4 :], r"the unknown quantization number 19"),
    ]
    for damaged, words in cases:
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=words):
            open_source(file)


def test_what_a_gguf_file_changes_is_refused(tmp_path):
    with pytest.raises(JaxdistError, match=r"stores 1 \+ scale for each norm"):
        rows(family_of(CONFIGS["gemma"], where=""), {})
    with pytest.raises(DataError, match="family bert cannot be read from a GGUF file: import"):
        rows(family_of(CONFIGS["bert"], where=""), {})


def write_tokenizer(folder, *before, prefix=False):
    """A tokenizer of two bytes that are never joined."""
    cuts_again = all(step["type"] != "Split" for step in before)
    own = {"type": "ByteLevel", "add_prefix_space": prefix, "use_regex": cuts_again}
    cut = {"type": "Sequence", "pretokenizers": [*before, own]}
    pairs = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    content = {"pre_tokenizer": cut, "model": pairs}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_a_tokenizer_without_merges_has_an_array_of_texts(tmp_path):
    write_tokenizer(tmp_path)
    write_gguf(
        tmp_path / "m.gguf",
        tokenizer_metadata(tmp_path, {"vocab_size": 2}),
        {},
        lambda name, layer: np.zeros(0),
        dtype="float32",
    )
    raw = (tmp_path / "m.gguf").read_bytes()
    at = raw.index(b"tokenizer.ggml.merges") + len("tokenizer.ggml.merges")
    # An array (9) of texts (8) without elements.
    assert struct.unpack_from("<IIQ", raw, at) == (9, 8, 0)
    assert read(tmp_path / "m.gguf").metadata["tokenizer.ggml.merges"] == []


@pytest.mark.parametrize(
    "before",
    [
        (),
        ({"type": "Digits", "individual_digits": True},),
        ({"type": "Split", "pattern": {"Regex": SPLITS["qwen2"]}, "behavior": "Isolated"},),
    ],
)
def test_a_tokenizer_that_puts_a_space_before_the_text_is_refused(before, tmp_path):
    """For byte pairs llama.cpp puts no space there."""
    write_tokenizer(tmp_path, *before)
    assert tokenizer_metadata(tmp_path, {"vocab_size": 2})["tokenizer.ggml.tokens"] == ["a", "b"]
    write_tokenizer(tmp_path, *before, prefix=True)
    with pytest.raises(ConfigError, match=r"add_prefix_space: true; use --to hf"):
        tokenizer_metadata(tmp_path, {"vocab_size": 2})
