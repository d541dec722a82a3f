"""The digest of what a model folder says of computing K and V, besides the weights (KVSP 4.1).

KVSP 4.1 wants "every parameter that affects the stored tensors" in the identity, and which of
those of `config.json` do is known to the model's code alone. So all count but a list of those that
cannot: two folders of one model that are named differently share nothing, which costs time; two
models with one name would give wrong tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvsp.names import ijson
from kvsp.names.codes import DIGEST_PREFIX

MEMBER: Final = "config_digest"
"""The member of a Compatibility Descriptor that has it."""

WITHOUT_EFFECT: Final = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)
"""Members of `config.json` that change no K and V of given tokens: where the model is from, how it
was made, where generating stops, what else is given back. `pad_token_id` is none of them: some
models count positions from it."""

_SAME: Final = {"torch_dtype": "dtype"}
"""Members by their older name, and what they are called now."""
_BESIDE: Final = ("*.py", "hf_quant_config.json", "quant*_config.json", "params.json")
"""Files that say besides how the weights are used: the model's own code, and quantization."""


def config_digest(folder: Path, config: Mapping[str, Any]) -> str:
    """The digest, `sha-256:` and 64 digits, of `config`, the `config.json` of `folder`, and of what
    lies beside it. What says the same in another way has the same digest where that is known:
    older names, and the parameters of rotary positions. Raises OSError for a file that cannot be
    read, DecodeError `not-i-json` for a configuration with a number that JSON has not."""
    tree = _plain(config)
    if isinstance(text := config.get("text_config"), dict):
        tree["text_config"] = _plain(text)
    paths = {path.name: path for pattern in _BESIDE for path in folder.glob(pattern)}
    files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    octets = ijson.canonical({"config": tree, "files": files})
    return DIGEST_PREFIX + hashlib.sha256(octets).hexdigest()


def rotary_members(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config` says of rotary positions in an object of its own, under whatever name."""
    said: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), dict):
            said |= config[name]
    return said


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The members that count, each in one spelling."""
    tree = {
        _SAME.get(name, name): value
        for name, value in config.items()
        if name not in WITHOUT_EFFECT and name not in ("rope_scaling", "rope_parameters")
    }
    if isinstance(tree.get("dtype"), str):
        tree["dtype"] = tree["dtype"].removeprefix("torch.")
    rotary = rotary_members(config)
    older = rotary.pop("type", None)
    rotary.setdefault("rope_type", older or "default")
    if "rope_theta" in tree:
        rotary.setdefault("rope_theta", tree.pop("rope_theta"))
    return tree | {"rope_parameters": rotary}
