"""`python -m tools.bench_logits --model MODEL`: what a codec does to what the model says.

A model reads the beginning of a text; its KV cache is encoded and decoded block by block, as it
would cross a relay, and the rest of the text is read on top of it. Compared are the logits of each
token of the rest with those on top of the same cache as codec raw has it: how much they change,
how far the distributions are apart (KL divergence, in nats), and how often the likeliest token is
another. The first line compares raw itself with the model's own cache, which has more bits: what
publishing in the element type costs without any codec.

MODEL is what `transformers` loads: a folder, or a `.gguf` file. Needs torch, transformers and, for
such a file, gguf, which the project does not: make an environment of its own.

    python -m tools.bench_logits --model SmolLM2-135M-Instruct.Q4_1.gguf
    python -m tools.bench_logits --model FOLDER --text README.md --tokens 1024 --context 768
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsp.blocks.codecs import decode_section, encode_section
from kvsp.blocks.layout import section_tensor
from kvsp.names.codes import Codec, ElementType
from kvsp.names.identity import Descriptor
from tools.demo import CACHE

TEXT = CACHE.with_name("smollm2-survey.prompt.txt")
BLOCK_TOKENS = 16


class Change(NamedTuple):
    """What differs between two runs over the same tokens."""

    largest: float
    """Of any logit."""
    mean: float
    """Of a logit, without its sign."""
    spread: float
    """Standard deviation of the logits themselves, which the others are to be seen beside."""
    kl_mean: float
    kl_largest: float
    """KL divergence of the distributions of the next token, in nats."""
    other_tokens: float
    """The part of the tokens after which the likeliest one is another."""


def change(before: np.ndarray, after: np.ndarray) -> Change:
    """Of logits, `[tokens, vocabulary]`, float64."""
    difference = np.abs(after - before)
    p, q = _log_softmax(before), _log_softmax(after)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    return Change(
        float(difference.max()),
        float(difference.mean()),
        float(before.std()),
        float(kl.mean()),
        float(kl.max()),
        float((before.argmax(axis=1) != after.argmax(axis=1)).mean()),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def crossed(tensor: np.ndarray, codec: Codec, descriptor: Descriptor) -> np.ndarray:
    """K or V of a layer, `[tokens, kv_heads, head_dim]` float32, as a consumer has it: in the
    descriptor's element type, each block encoded and decoded."""
    held = np.ascontiguousarray(tensor.astype(descriptor.dtype))
    blocks = []
    for at in range(0, len(held), descriptor.block_tokens):
        section = held[at : at + descriptor.block_tokens].view(np.uint8).tobytes()
        decoded = decode_section(codec, encode_section(codec, section, descriptor), descriptor)
        blocks.append(section_tensor(decoded, descriptor))
    return np.concatenate(blocks).astype(np.float32)


class Model:
    """A model and a text that it reads in two parts."""

    def __init__(self, path: Path, text: str, tokens: int, context: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self._model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(**where)(text)["input_ids"][:tokens]
        if len(ids) <= context:
            raise SystemExit(f"the text has {len(ids)} tokens: --context has to be less")
        self._ids = torch.tensor([ids])
        self.context = context
        with torch.no_grad():
            read = self._model(self._ids[:, :context], use_cache=True)
        self._cache = read.past_key_values
        layer = self._cache.layers[0].keys
        self.shape = len(self._cache.layers), int(layer.shape[1]), int(layer.shape[3])
        """Layers, heads of K and V, dimensions of each."""

    def logits(self, codec: Codec | None, descriptor: Descriptor) -> np.ndarray:
        """Those of the rest of the text, its beginning as the codec has it; None: as the model."""
        cache = copy.deepcopy(self._cache)
        for layer in cache.layers if codec is not None else ():
            assert codec is not None
            for name in ("keys", "values"):
                rows = getattr(layer, name)[0].transpose(0, 1).numpy()
                made = self.torch.from_numpy(crossed(rows, codec, descriptor))
                setattr(layer, name, made.transpose(0, 1)[None].contiguous())
        with self.torch.no_grad():
            said = self._model(self._ids[:, self.context :], past_key_values=cache)
        result: np.ndarray = said.logits[0].double().numpy()
        return result


def descriptor_of(shape: tuple[int, int, int], element: ElementType) -> Descriptor:
    layers, heads, dims = shape
    digest = "sha-256:" + "00" * 32
    return Descriptor.parse(
        {
            "model": "bench",
            "model_digest": digest,
            "tokenizer_digest": digest,
            "layers": layers,
            "kv_heads": heads,
            "head_dim": dims,
            "kv_dtype": element.value,
            "positional": "rope",
            "block_tokens": BLOCK_TOKENS,
            "layout": "kvsp-layout-1",
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=160, help="of the text, at the most")
    parser.add_argument("--context", type=int, default=96, help="of them, in whole blocks of 16")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    options = parser.parse_args()
    if options.context < BLOCK_TOKENS or options.context % BLOCK_TOKENS:
        parser.error(f"--context is a multiple of {BLOCK_TOKENS}")
    model = Model(options.model, options.text.read_text("utf-8"), options.tokens, options.context)
    found: dict[str, Change] = {}
    for element in (ElementType.FP16, ElementType.BF16):
        descriptor = descriptor_of(model.shape, element)
        raw = model.logits(Codec.RAW, descriptor)
        found[f"raw {element.value}"] = change(model.logits(None, descriptor), raw)
        for codec in (each for each in Codec if not each.lossless):
            coded = model.logits(codec, descriptor)
            found[f"{codec.label} {element.value}"] = change(raw, coded)
    if options.json:
        print(json.dumps({name: each._asdict() for name, each in found.items()}))
        return
    for name, each in found.items():
        print(
            f"{name:10} logits change by {each.largest:.3f} at most, {each.mean:.4f} in the mean "
            f"(they spread by {each.spread:.2f}); KL {each.kl_mean:.2e} in the mean, "
            f"{each.kl_largest:.2e} at most; another likeliest token after {each.other_tokens:.1%}"
        )


if __name__ == "__main__":
    main()
