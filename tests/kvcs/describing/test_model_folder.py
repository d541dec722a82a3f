"""The descriptor of a model folder."""

from __future__ import annotations

import hashlib
import json

import pytest

from kvcs.describing.model_folder import describe, unshareable
from kvsp.names.errors import DecodeError, FileError

LLAMA = {
    "_name_or_path": "somebody/tiny",
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
COUNTS = (
    b'{"config":{"dtype":"bfloat16","hidden_size":64,"model_type":"llama","num_attention_heads":4,'
    b'"num_hidden_layers":3,"num_key_value_heads":2,'
    b'"rope_parameters":{"rope_theta":10000,"rope_type":"default"}},"files":{}}'
)
"""What of it has an effect on K and V, as RFC 8785 writes it."""


@pytest.fixture
def folder(tmp_path):
    def made(**changes):
        config = {key: each for key, each in (LLAMA | changes).items() if each is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "b.safetensors").write_bytes(b"second")
        (tmp_path / "a.safetensors").write_bytes(b"first")
        (tmp_path / "tokenizer.json").write_bytes(b"{}")
        return tmp_path

    return made


def test_it_says_what_config_weights_and_tokenizer_say(folder):
    descriptor = describe(folder(), block_tokens=64)
    assert descriptor.to_dict() == {
        "model": "somebody/tiny",
        "model_digest": "sha-256:" + hashlib.sha256(b"firstsecond").hexdigest(),
        "tokenizer_digest": "sha-256:" + hashlib.sha256(b"{}").hexdigest(),
        "layers": 3,
        "kv_heads": 2,
        "head_dim": 16,
        "kv_dtype": "bf16",
        "positional": "rope",
        "block_tokens": 64,
        "layout": "kvsp-layout-1",
        "config_digest": "sha-256:" + hashlib.sha256(COUNTS).hexdigest(),
    }


def test_older_and_newer_ways_to_say_the_same_are_understood(folder):
    newer = folder(rope_theta=None, rope_parameters={"rope_theta": 1.0}, torch_dtype=None)
    config = json.loads((newer / "config.json").read_text()) | {"dtype": "float16", "head_dim": 32}
    (newer / "config.json").write_text(json.dumps({"text_config": config}))
    descriptor = describe(newer, block_tokens=16, name="it")
    assert (descriptor.kv_dtype, descriptor.head_dim, descriptor.model) == ("fp16", 32, "it")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_scaling_that_is_switched_on_beside_the_same_weights_is_another_identity(folder):
    texts = {
        str(describe(folder(**changes), block_tokens=16).positional)
        for changes in (
            {},
            {"rope_scaling": YARN},
            {"rope_scaling": YARN | {"factor": 2.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rope_parameters": {"full_attention": YARN, "other": {"rope_type": "default"}}},
        )
    }
    assert {text.partition("-")[0] for text in texts} == {
        "rope",
        "rope;scaling=yarn",
        "rope;scaling=linear",
        "rope;scaling=by",
    }
    assert len(texts) == 5


def test_the_same_scaling_has_one_text_however_it_is_said(folder):
    older = {name: each for name, each in YARN.items() if name != "rope_type"} | {"type": "yarn"}
    newer = YARN | {"rope_theta": 10000.0, "factor": 4}
    said = [{"rope_scaling": YARN}, {"rope_scaling": older}, {"rope_parameters": newer}]
    assert len({describe(folder(**each), block_tokens=16) for each in said}) == 1
    said += [{"rope_parameters": newer | {"partial_rotary_factor": 1.0}}]
    assert len({str(describe(folder(**each), block_tokens=16).positional) for each in said}) == 1
    plain = [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}]
    plain += [{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}]
    assert {str(describe(folder(**each), block_tokens=16).positional) for each in plain} == {"rope"}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "su"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic"),
    ],
)
def test_positions_that_change_with_the_length_of_the_prompt_make_no_prefix(changes, kind, folder):
    """K of the first tokens of a long prompt is not that of the same tokens in a short one."""
    with pytest.raises(FileError, match=rf"\({kind}\) change with the length.*--positional"):
        describe(folder(**changes), block_tokens=16)
    said = describe(folder(**changes), block_tokens=16, positional="rope;length=131072")
    assert str(said.positional) == "rope;length=131072"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500000.0},
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"intermediate_size": 128},
        {"max_position_embeddings": 8192},
        {"partial_rotary_factor": 0.5},
        {"torch_dtype": "float32"},
        {"attention_bias": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"nobody_has_heard_of_it": 1},
        {"pad_token_id": 3},
    ],
)
def test_whatever_config_says_that_may_change_k_and_v_is_another_identity(changes, folder):
    """Also where weights, tokenizer, geometry and element type of the cache are the same."""
    said = [describe(folder(**each), block_tokens=16, kv_dtype="bf16") for each in ({}, changes)]
    assert len({each.compat_id for each in said}) == 2
    nested = []
    for each in ({}, changes):
        made = folder(**each)
        tree = {"text_config": json.loads((made / "config.json").read_text()), "vision": {}}
        (made / "config.json").write_text(json.dumps(tree))
        nested.append(describe(made, block_tokens=16, name="it", kv_dtype="bf16"))
    assert len({each.compat_id for each in nested}) == 2


@pytest.mark.parametrize("name", ["modeling_it.py", "hf_quant_config.json", "quantize_config.json"])
def test_what_lies_beside_config_and_says_how_to_compute_is_in_the_identity(name, folder):
    plain = describe(folder(), block_tokens=16)
    (folder() / name).write_text("1")
    one = describe(folder(), block_tokens=16)
    (folder() / name).write_text("2")
    assert len({each.compat_id for each in (plain, one, describe(folder(), block_tokens=16))}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_version": "5.0.0"},
        {"use_cache": False, "eos_token_id": [1, 2], "bos_token_id": 0},
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"torch_dtype": "torch.bfloat16"},
        {"rope_scaling": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
    ],
)
def test_what_cannot_change_k_and_v_or_says_the_same_is_the_same_identity(changes, folder):
    plain = describe(folder(), block_tokens=16)
    assert describe(folder(**changes), block_tokens=16).compat_id == plain.compat_id
    renamed = folder(_name_or_path="somebody/else")
    assert describe(renamed, block_tokens=16, name="somebody/tiny").compat_id == plain.compat_id


def test_a_number_that_json_has_not_is_said_with_the_folder(folder):
    with pytest.raises(FileError, match=r"config\.json.*canonical"):
        describe(folder(scale=float("inf")), block_tokens=16)


def test_without_heads_of_its_own_k_has_those_of_the_queries(folder):
    assert describe(folder(num_key_value_heads=None), block_tokens=16).kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sliding_window": 4096}, "slides over 4096 tokens"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128},
            "slides over 128",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"mamba_d_state": 16}, "hybrid"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"num_key_value_heads": [2, 4]}, "different numbers"),
    ],
)
def test_a_model_whose_cache_is_no_prefix_of_others_is_refused_with_the_reason(
    changes, why, folder
):
    with pytest.raises(FileError, match=why):
        describe(folder(**changes), block_tokens=16)


def test_a_window_that_is_switched_off_is_full_attention():
    assert unshareable({"sliding_window": 4096, "use_sliding_window": False}) is None
    assert unshareable({"sliding_window": 4096, "layer_types": ["full_attention"]}) is None


def test_what_config_does_not_show_has_to_be_said(folder):
    silent = folder(rope_theta=None, torch_dtype=None)
    with pytest.raises(FileError, match="--kv-dtype"):
        describe(silent, block_tokens=16)
    with pytest.raises(FileError, match="--positional"):
        describe(silent, block_tokens=16, kv_dtype="fp32")
    said = describe(silent, block_tokens=16, kv_dtype="fp32", positional="rope;factor=4")
    assert str(said.positional) == "rope;factor=4"
    with pytest.raises(DecodeError):
        describe(silent, block_tokens=16, kv_dtype="fp32", positional="Rope !")


@pytest.mark.parametrize("kinds", [3, "full_attention", [["full_attention"]], [1, "attention"]])
def test_layer_types_that_are_no_names_are_said(folder, kinds):
    with pytest.raises(FileError, match="layer_types"):
        describe(folder(layer_types=kinds), block_tokens=16)


def test_a_configuration_that_nests_without_end_is_said(folder):
    made = folder()
    (made / "config.json").write_text("[" * 200_000)
    with pytest.raises(FileError, match="nests too deeply"):
        describe(made, block_tokens=16)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "*.safetensors"])
def test_a_folder_that_lacks_a_part_is_named_with_it(name, folder):
    made = folder()
    for path in made.glob(name):
        path.unlink()
    with pytest.raises(FileError, match=name.split(".")[0].strip("*") or "weights"):
        describe(made, block_tokens=16)


def test_a_config_that_cannot_be_read_is_said_in_words(folder, tmp_path):
    with pytest.raises(FileError) as error:
        describe(tmp_path / "nowhere", block_tokens=16)
    assert str(error.value).endswith(
        "no folder with a model: config.json: No such file or directory"
    )
    made = folder()
    (made / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config\.json is not JSON: "):
        describe(made, block_tokens=16)
