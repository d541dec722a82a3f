"""The descriptor of the model that runs, and what is refused because no name covers it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvcs.describing.configuration import config_digest
from kvcs.vllm.describe import (
    RefusedError,
    check_config,
    check_descriptor,
    check_groups,
    descriptor_of,
    element_of,
    refused_request,
)
from kvcs.vllm.settings import Settings
from kvcs.vllm.starting import model_descriptor
from kvsp.names.identity import Descriptor, model_digest
from tests.kvcs.vllm.base import vllm_config
from tests.kvcs.vllm.engine import Request
from tests.kvcs.vllm.stories import descriptor_of as descriptor_of_toy

CONFIG = {
    "model_type": "toy",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_size": 16,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A model's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "tokenizer.json").write_text("{}")
    return made


def test_the_descriptor_says_what_the_model_is_on_all_ranks_together(folder: Path) -> None:
    said = descriptor_of(vllm_config(dtype="bfloat16"), folder, 64).to_dict()
    assert said.pop("model_digest") == model_digest({"model.safetensors": b"weights"})
    assert said.pop("config_digest") == config_digest(folder, CONFIG)
    assert said.pop("tokenizer_digest") == "sha-256:" + hashlib.sha256(b"{}").hexdigest()
    assert said == {
        "model": "toy",
        "layers": 3,
        "kv_heads": 2,
        "head_dim": 4,
        "kv_dtype": "bf16",
        "positional": "rope",
        "block_tokens": 64,
        "layout": "kvsp-layout-1",
    }


def test_a_folder_of_another_name_is_of_the_same_identity(folder: Path) -> None:
    here = descriptor_of(vllm_config(), folder, 64)
    assert descriptor_of(vllm_config(), folder.rename(folder.with_name("b")), 64) == here


def test_weights_that_vllm_quantizes_itself_are_of_another_identity(folder: Path) -> None:
    plain, online = vllm_config(), vllm_config(model_config__quantization="fp8")
    assert descriptor_of(plain, folder, 64) != descriptor_of(online, folder, 64)


def test_positions_that_are_not_rotary_need_a_descriptor_file(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": None}))
    with pytest.raises(RefusedError, match=r"no rotary encoding.*\"descriptor\" file"):
        descriptor_of(vllm_config(), folder, 64)


def test_positions_of_the_longest_prompt_are_named_by_its_length(folder: Path) -> None:
    """vLLM takes the long or the short factors of LongRoPE by --max-model-len, for all prompts."""
    scaling = {"rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_scaling": scaling}))
    short, long = (
        descriptor_of(vllm_config(model_config__max_model_len=most), folder, 64)
        for most in (4096, 131072)
    )
    assert short.compat_id != long.compat_id
    assert str(long.positional).startswith("rope;length=131072;scaling=longrope-")


def test_a_model_that_is_not_on_this_machine_is_refused_with_what_to_give(tmp_path) -> None:
    settings = Settings.parse({"relay": "moqt://a", "scope_key_file": "b"})
    with pytest.raises(RefusedError, match="not found on this machine"):
        model_descriptor(settings, vllm_config(model_config__model=str(tmp_path / "nowhere")))


def test_a_configuration_with_full_attention_may_share() -> None:
    check_config(vllm_config())


@pytest.mark.parametrize(
    "member, value, mends",
    [
        ("kv_transfer_config__kv_load_failure_policy", "fail", '"kv_load_failure_policy": "rec'),
        ("parallel_config__pipeline_parallel_size", 2, "--pipeline-parallel-size 1"),
        ("parallel_config__decode_context_parallel_size", 2, "--decode-context-parallel-size 1"),
        ("model_config__use_mla", True, "without the connector"),
        ("model_config__is_hybrid", True, "without the connector"),
        ("model_config__is_attention_free", True, "without the connector"),
        ("model_config__is_encoder_decoder", True, "without the connector"),
        ("model_config__get_sliding_window", lambda: 4096, "--disable-sliding-window"),
        ("model_config__hf_text_config__layer_types", ["full_attention", "x"], "not full"),
        ("model_config__hf_text_config__attention_chunk_size", 8192, "not full"),
        ("cache_config__cache_dtype", "fp8", "--kv-cache-dtype auto"),
        ("model_config__dtype", "torch.float8_e4m3fn", "--dtype bfloat16"),
        ("model_config__hf_overrides", {"rope_theta": 1}, "without --hf-overrides"),
        ("speculative_config", SimpleNamespace(method="eagle3"), "--speculative-config"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_mends_it(member, value, mends) -> None:
    with pytest.raises(RefusedError, match="kvcs: ") as refused:
        check_config(vllm_config(**{member: value}))
    assert mends in str(refused.value)


def test_a_configuration_that_names_no_policy_is_refused_as_vllm_would_fail_requests() -> None:
    config = vllm_config()
    del config.kv_transfer_config.kv_load_failure_policy
    with pytest.raises(RefusedError, match="recompute"):
        check_config(config)


def test_guessing_tokens_from_the_prompt_needs_no_cache_of_its_own() -> None:
    check_config(vllm_config(speculative_config=SimpleNamespace(method="ngram")))


def test_layers_in_several_groups_of_caches_are_refused() -> None:
    full = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32, sliding_window=None))
    window = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32, sliding_window=1024))
    assert check_groups(vllm_config(), None) == 16
    assert check_groups(vllm_config(), SimpleNamespace(kv_cache_groups=[full])) == 32
    for groups in ([full, window], [window]):
        with pytest.raises(RefusedError, match="contiguous prefix"):
            check_groups(vllm_config(), SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize(
    "member, value",
    [
        ("lora_request", object()),
        ("mm_features", [object()]),
        ("cache_salt", "of one tenant"),
        ("prompt_embeds", object()),
        ("pooling_params", object()),
        ("sampling_params", SimpleNamespace(prompt_logprobs=1)),
        ("skip_reading_prefix_cache", True),
    ],
)
def test_a_request_that_no_name_covers_is_not_looked_up(member: str, value) -> None:
    assert refused_request(Request("r", [1])) is None
    assert refused_request(Request("r", [1], sampling_params=SimpleNamespace())) is None
    assert refused_request(Request("r", [1], **{member: value})) is not None


def test_the_element_type_is_that_of_the_tensors_not_of_flags() -> None:
    assert element_of(np.zeros(1, "float16")) == "fp16"
    assert element_of(SimpleNamespace(dtype="torch.bfloat16")) == "bf16"
    assert element_of(SimpleNamespace(dtype="torch.float8_e5m2")) == "float8_e5m2"


def test_a_descriptor_of_another_model_is_refused() -> None:
    described = descriptor_of_toy(64)
    check_descriptor(described, vllm_config())
    with pytest.raises(RefusedError, match="'layers' is 3, and the model that runs has 4"):
        check_descriptor(described, vllm_config(layers=4))


def test_a_descriptor_of_another_configuration_of_the_same_weights_is_refused(folder: Path) -> None:
    described = descriptor_of(vllm_config(), folder, 64)
    config = vllm_config(model_config__model=str(folder))
    check_descriptor(described, config)
    by_hand = {name: each for name, each in described.to_dict().items() if name != "config_digest"}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-3}))
    check_descriptor(Descriptor.parse(by_hand), config)
    with pytest.raises(RefusedError, match=r"another config\.json.*kvcs-describe"):
        check_descriptor(described, config)


def test_a_descriptor_file_is_read_and_held_against_the_model(tmp_path: Path) -> None:
    file = tmp_path / "compat.json"
    file.write_text(json.dumps(descriptor_of_toy(16).to_dict()))
    settings = Settings.parse({"relay": "moqt://a", "scope_key_file": "b", "descriptor": str(file)})
    assert model_descriptor(settings, vllm_config()) == descriptor_of_toy(16)
    with pytest.raises(RefusedError, match="kvcs-describe"):
        model_descriptor(settings, vllm_config(heads=1))
