"""The Compatibility Descriptor of a model folder as Hugging Face has them (KVSP 4.1)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvcs.describing.configuration import MEMBER, config_digest, rotary_members
from kvcs.describing.digests import weights_digest
from kvsp.names import ijson
from kvsp.names.codes import DIGEST_PREFIX, LAYOUT_1
from kvsp.names.errors import DecodeError, FileError
from kvsp.names.identity import Descriptor

ELEMENTS: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""`kv_dtype` by torch's name of the element type."""
_ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_dim", "rotary_pct")
_UNSCALED: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""What may stand among the parameters of scaling, or beside them, and is none of them."""
_BY_LENGTH: Final = frozenset({"dynamic", "longrope", "su"})
"""Kinds of scaling that depend on how long the prompt is."""
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
"""What holds the weights, the first kind that is there."""
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


def describe(
    folder: Path,
    *,
    block_tokens: int,
    name: str | None = None,
    kv_dtype: str | None = None,
    positional: str | None = None,
    kept: Path | None = None,
) -> Descriptor:
    """The descriptor of the model in `folder`.

    `name` replaces the name that the folder says; `kv_dtype` the element type of its weights, when
    the cache has another one; `positional` is needed where its configuration does not show a
    rotary encoding, or the engine runs with other parameters than it says. `kept` is the file of
    digests of weights. Whatever else the configuration says is in the identity by its digest
    (`config_digest`). Raises FileError, with the reason, for what is no such folder and for a
    model whose cache is no prefix that others can share; DecodeError for a value that there cannot
    be.
    """
    config = read_config(folder)
    text = text_config(config)
    kinds = text.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
        raise FileError(f"{folder}: 'layer_types' in config.json is no list of names")
    refused = unshareable(text)
    if refused is not None:
        raise FileError(f"{folder}: {refused}")
    heads = _number(folder, text, "num_attention_heads", "n_head")
    layers = _number(folder, text, "num_hidden_layers", "n_layer")
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or _number(folder, text, "hidden_size", "n_embd") // heads
    if kv_dtype is None:
        said = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype"))
        kv_dtype = ELEMENTS.get(said.removeprefix("torch."))
        if kv_dtype is None:
            raise FileError(
                f"{folder}: config.json says {said!r} for its elements: name those of the cache "
                "(--kv-dtype)"
            )
    if positional is None:
        if not any(text.get(each) for each in _ROPE):
            raise FileError(
                f"{folder}: config.json shows no rotary encoding: name the positional encoding "
                "(--positional)"
            )
        if (kind := scaled_by_length(text)) is not None:
            raise FileError(
                f"{folder}: its rotary positions ({kind}) change with the length of the prompt, so "
                "its cache is no prefix of a longer one. Where the engine keeps them as they are "
                "for one length, say which (--positional 'rope;length=131072')"
            )
        positional = rotary(text)
    return Descriptor.parse(
        {
            "model": name or str(config.get("_name_or_path") or folder.resolve().name),
            "model_digest": _weights(folder, kept),
            "tokenizer_digest": _tokenizer(folder),
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "kv_dtype": kv_dtype,
            "positional": positional,
            "block_tokens": block_tokens,
            "layout": LAYOUT_1,
            MEMBER: digest_of(folder, config),
        }
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model's folder. Raises FileError when there is none."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        why = error.strerror or str(error)
        raise FileError(f"{folder}: no folder with a model: config.json: {why}") from None
    except ValueError as error:
        raise FileError(f"{folder}: config.json is not JSON: {error}") from None
    except RecursionError:
        raise FileError(f"{folder}: config.json nests too deeply") from None
    if not isinstance(config, dict):
        raise FileError(f"{folder}: config.json holds no object")
    return config


def digest_of(folder: Path, config: Mapping[str, Any]) -> str:
    """`config_digest` of a folder; raises FileError with what is wrong there."""
    try:
        return config_digest(folder, config)
    except OSError as error:
        raise FileError(f"{error.filename}: {error.strerror or error}") from None
    except DecodeError as error:
        raise FileError(f"{folder}: config.json: {error.detail}") from None


def unshareable(config: Mapping[str, Any]) -> str | None:
    """Why the cache of a prompt is no prefix of longer ones, or has another form than K and V of
    equal heads in every layer; None when it is one. `config` is that of the text model."""
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "attention"}
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    if slides and (kinds or not config.get("layer_types")):
        return (
            f"its attention slides over {config['sliding_window']} tokens: what lies before is not "
            "in the cache, so it is no prefix of a longer one"
        )
    if kinds:
        return (
            f"it has layers of the kinds {', '.join(sorted(kinds))}: only full attention keeps K "
            "and V of every token"
        )
    if config.get("kv_lora_rank"):
        return (
            "it keeps a latent instead of K and V (MLA, 'kv_lora_rank'), which has no layout here"
        )
    for name in ("ssm_cfg", "mamba_d_state", "layers_block_type", "linear_num_key_heads"):
        if config.get(name):
            return f"it is hybrid ({name!r}): not every layer keeps K and V of every token"
    if config.get("is_encoder_decoder"):
        return "it is an encoder with a decoder: K and V are not of the prompt alone"
    if not isinstance(config.get("num_key_value_heads", 1), int | None):
        return "its layers have different numbers of KV heads"
    return None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, where there are others beside it."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def scaled_by_length(config: Mapping[str, Any]) -> str | None:
    """The kind of scaling of rotary positions, when that depends on how long the prompt is: then K
    of its beginning is not that of the same tokens alone."""
    said = rotary_members(config)
    every = [said, *(each for each in said.values() if isinstance(each, dict))]
    kinds = {str(each.get("rope_type") or each.get("type")).lower() for each in every}
    return next(iter(sorted(kinds & _BY_LENGTH)), None)


def rotary(config: Mapping[str, Any]) -> str:
    """The rotary encoding. Scaling is a part of its text: it is switched on by writing it into the
    configuration, beside weights that stay the same."""
    said = rotary_members(config)
    kind = said.get("rope_type") or said.get("type")
    if kind is None and any(isinstance(each, dict) for each in said.values()):
        kind = "by-layer"
    if kind in (None, "default", "mrope"):
        return "rope"  # positions of text are the same ones with mrope
    scaling = {name: each for name, each in said.items() if name not in _UNSCALED}
    digest = hashlib.sha256(ijson.canonical(scaling)).hexdigest()
    return f"rope;scaling={str(kind).lower()}-{digest[:16]}"


def _number(folder: Path, config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise FileError(f"{folder}: config.json has no {names[0]!r}")


def _weights(folder: Path, kept: Path | None) -> str:
    for pattern in _WEIGHTS:
        files = {path.name: path for path in folder.glob(pattern)}
        if files:
            try:
                return weights_digest(files, kept)
            except OSError as error:
                raise FileError(f"{error.filename}: {error.strerror or error}") from None
    raise FileError(f"{folder}: there are no weights ({', '.join(_WEIGHTS)})")


def _tokenizer(folder: Path) -> str:
    for name in _TOKENIZERS:
        path = folder / name
        if path.exists():
            try:
                return DIGEST_PREFIX + hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise FileError(f"{path}: {error.strerror or error}") from None
    raise FileError(f"{folder}: there is no tokenizer ({', '.join(_TOKENIZERS)})")
