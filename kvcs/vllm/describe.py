"""The Compatibility Descriptor of the model that vLLM runs, and what cannot be shared.

Whatever changes K and V and is in no name would give wrong tokens without an error: it is refused
when the engine starts, with the sentence that mends it, or for the request that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcs.describing.configuration import MEMBER
from kvcs.describing.digests import cache_file
from kvcs.describing.model_folder import (
    ELEMENTS,
    describe,
    digest_of,
    read_config,
    rotary,
    scaled_by_length,
    text_config,
)
from kvsp.names.errors import FileError
from kvsp.names.identity import Descriptor


class RefusedError(ValueError):
    """This engine's configuration cannot share KV caches; the message says what to change."""


def check_config(vllm_config: Any) -> None:
    """Raises RefusedError for a configuration under which what is shared would be wrong, or a
    failure would cost a request."""
    for refused in (_transfer, _parallel, _attention, _elements, _others):
        why = refused(vllm_config)
        if why is not None:
            raise RefusedError(f"kvcs: {why}")


def _transfer(config: Any) -> str | None:
    policy = getattr(config.kv_transfer_config, "kv_load_failure_policy", "fail")
    if policy != "recompute":
        return (
            f"kv_load_failure_policy is {policy!r}: a load that fails would fail its request. Add "
            '"kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    return None


def _parallel(config: Any) -> str | None:
    parallel = config.parallel_config
    for name, option in (
        ("pipeline_parallel_size", "--pipeline-parallel-size 1"),
        ("decode_context_parallel_size", "--decode-context-parallel-size 1"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size 1"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            return (
                f"{name} is {size}: a worker would have a part of the layers or of the tokens "
                f"only. Run with {option}; tensor parallelism is served"
            )
    return None


def _attention(config: Any) -> str | None:
    model = config.model_config
    if getattr(model, "use_mla", False):
        return (
            "the model has multi-head latent attention, whose cache is no K and V of heads. Run it "
            "without the connector, or with VLLM_MLA_DISABLE=1 on all engines that share"
        )
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        return (
            "the model has layers without attention, whose state is no prefix of tokens. Run it "
            "without the connector"
        )
    if getattr(model, "is_encoder_decoder", False):
        return "the model has an encoder, whose cache is no prefix. Run it without the connector"
    text = model.hf_text_config
    types = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    chunk = getattr(text, "attention_chunk_size", None)
    if model.get_sliding_window() or types or chunk:
        kinds = ", ".join(sorted(types)) or ("chunks" if chunk else "a sliding window")
        return (
            f"the model's attention is not full ({kinds}): its pages are no contiguous prefix. Run "
            f"it without the connector, or with --disable-sliding-window where the model allows it"
        )
    return None


def _elements(config: Any) -> str | None:
    kept = config.cache_config.cache_dtype
    if kept not in ("auto", *ELEMENTS):
        return (
            f"the KV cache is quantized ({kept}): its scales are not on the wire. Run with "
            f"--kv-cache-dtype auto"
        )
    name = _element(config)
    if name not in ELEMENTS:
        return (
            f"K and V are of type {name}, and only {', '.join(ELEMENTS)} are known. Run with "
            f"--dtype bfloat16"
        )
    return None


def _others(config: Any) -> str | None:
    model = config.model_config
    if getattr(model, "hf_overrides", None):
        return (
            "hf_overrides changes the model and is in no name. Write the change into the "
            "config.json of a copy of the model and run that without --hf-overrides: what it says "
            "is in the model's identity"
        )
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None and getattr(speculative, "method", None) not in ("ngram", "suffix"):
        return (
            "speculative decoding by a draft model has a KV cache of its own, which is not shared. "
            "Run with the method ngram, or without --speculative-config"
        )
    return None


def _element(config: Any) -> str:
    kept = config.cache_config.cache_dtype
    dtype = config.model_config.dtype if kept == "auto" else kept
    return str(dtype).removeprefix("torch.")


def element_of(tensor: Any) -> str:
    """The `kv_dtype` of a tensor as it is, whatever flags say; its own name when that is none."""
    name = str(tensor.dtype).removeprefix("torch.")
    return ELEMENTS.get(name, name)


def refused_request(request: Any) -> str | None:
    """What a request has that no name of a cache covers, or that needs every token computed."""
    if getattr(request, "lora_request", None) is not None:
        return "it is for a LoRA adapter, which is in no name"
    if getattr(request, "mm_features", None):
        return "it has images or other inputs besides tokens"
    if getattr(request, "prompt_embeds", None) is not None:
        return "its prompt is not given as tokens"
    if getattr(request, "cache_salt", None):
        return "it has a cache_salt, which is not to meet others"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "it asks that every token is computed"
    if getattr(request, "pooling_params", None) is not None:
        return "it asks for a vector of all its tokens, not for further ones"
    sampling = getattr(request, "sampling_params", None)
    if sampling is not None and getattr(sampling, "prompt_logprobs", None) is not None:
        return "it asks for prompt_logprobs, for which every token is computed"
    return None


def descriptor_of(vllm_config: Any, folder: Path, block_tokens: int) -> Descriptor:
    """The descriptor of the model in `folder`, as vLLM runs it. It is called by its architecture:
    folders have other names on other machines. Raises RefusedError."""
    model = vllm_config.model_config
    try:
        descriptor = describe(
            folder,
            block_tokens=block_tokens,
            name=str(model.hf_text_config.model_type),
            kv_dtype=ELEMENTS[_element(vllm_config)],
            positional=_of_one_length(model, folder),
            kept=cache_file(),
        )
    except FileError as error:
        raise RefusedError(
            f'kvcs: {error}. Where the files are otherwise, give a "descriptor" file in '
            f"kv_connector_extra_config"
        ) from None
    if (online := _online_quantization(model)) is not None:
        # the digest is of the files, which do not have the weights that run
        descriptor = Descriptor.parse({**descriptor.to_dict(), "quantization": online})
    check_descriptor(descriptor, vllm_config)
    return descriptor


def _of_one_length(model: Any, folder: Path) -> str | None:
    """The positional encoding, when it would change with the length of the prompt: vLLM takes that
    of the longest one that it is run for, for all. None for any other. Raises FileError."""
    text = text_config(read_config(folder))
    if scaled_by_length(text) is None:
        return None
    name, scaling = rotary(text).split(";")
    return f"{name};length={int(model.max_model_len)};{scaling}"


def _online_quantization(model: Any) -> str | None:
    """How vLLM quantizes weights as it loads them; None when the files are used as they are."""
    wanted = getattr(model, "quantization", None)
    if wanted is None or getattr(model.hf_config, "quantization_config", None) is not None:
        return None
    return str(wanted)


def check_descriptor(descriptor: Descriptor, vllm_config: Any) -> None:
    """Raises RefusedError when a descriptor is not of the model that runs, FileError when the
    files of that cannot be read."""
    model = vllm_config.model_config
    is_now: Mapping[str, Any] = {
        "layers": int(model.hf_text_config.num_hidden_layers),
        "kv_heads": int(model.get_total_num_kv_heads()),
        "head_dim": int(model.get_head_size()),
        "kv_dtype": ELEMENTS[_element(vllm_config)],
    }
    for name, value in is_now.items():
        if getattr(descriptor, name) != value:
            raise RefusedError(
                f"kvcs: the descriptor's {name!r} is {getattr(descriptor, name)!r}, and the model "
                f"that runs has {value!r}. Make it anew with `kvcs-describe`"
            )
    said, folder = descriptor.to_dict().get(MEMBER), Path(model.model)
    if said is None or not folder.is_dir():
        return  # it was written by hand, or the files are not at hand
    if said != digest_of(folder, read_config(folder)):
        raise RefusedError(
            f"kvcs: the descriptor is of another config.json than that of {folder}: K and V may "
            f"differ though the weights are the same. Make it anew with `kvcs-describe`"
        )


def most_layerwise(vllm_config: Any) -> int:
    """Tokens of the longest prompt that may be loaded within a forward pass.

    When such a load fails, requests of the same pass may have begun with the same pages. vLLM has
    the first of them compute those again, and the others take them as they are in that next pass:
    so it has to do all of it in one pass, and before any other was planned.
    """
    scheduler = vllm_config.scheduler_config
    return 0 if scheduler.async_scheduling else int(scheduler.max_num_batched_tokens) // 2


def check_groups(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of a page. Raises RefusedError when layers keep their caches in different ways."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if not groups:
        return int(vllm_config.cache_config.block_size)
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) > 1 or getattr(groups[0].kv_cache_spec, "sliding_window", None):
        raise RefusedError(
            f"kvcs: vLLM keeps {len(groups)} groups of caches ({', '.join(kinds)}), and only a "
            f"single one of full attention is a contiguous prefix. Run without the connector"
        )
    return int(groups[0].kv_cache_spec.block_size)
