"""K and V of transformers, and as they are published."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from transformers import DynamicCache  # noqa: E402

from kvcs.names.errors import MisuseError, Unsupported  # noqa: E402
from kvcs.torch.layouts import (  # noqa: E402
    check_model,
    from_layout,
    to_layout,
    token_ids,
)
from kvsp.blocks.layout import check_tensor  # noqa: E402
from tests.kvcs.torch.support import descriptor, tiny_config  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_what_is_published_and_received_is_the_same_tensor(kv_dtype):
    tensor = torch.randn(1, 2, 20, 8).to(DTYPES[kv_dtype])
    array = to_layout(tensor, slice(4, 20))
    check_tensor(array, descriptor(kv_dtype))
    assert array.shape == (16, 2, 8)
    assert torch.equal(from_layout(array, tensor), tensor[:, :, 4:20])


def test_what_is_published_does_not_change_with_the_cache():
    for tensor in (torch.zeros(1, 2, 4, 8), torch.zeros(1, 4, 2, 8).transpose(1, 2)):
        array = to_layout(tensor, slice(4))
        tensor += 1
        assert not array.any()


def test_one_sequence_at_a_time():
    with pytest.raises(MisuseError, match="one sequence"):
        to_layout(torch.zeros(2, 2, 4, 8), slice(4))
    with pytest.raises(MisuseError, match="one prompt"):
        token_ids(torch.zeros(2, 4, dtype=torch.int64))
    assert token_ids(torch.tensor([[1, 2]])) == token_ids(torch.tensor([1, 2])) == [1, 2]


def test_another_element_type_than_the_models_is_refused():
    array = to_layout(torch.zeros(1, 2, 4, 8), slice(4))
    with pytest.raises(MisuseError, match=r"float32.*float16"):
        from_layout(array, torch.zeros(1, dtype=torch.float16))


def test_a_model_of_full_attention_whose_descriptor_it_is_can_be_shared():
    check_model(tiny_config(), descriptor())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layers": 4}, "3 layers.*descriptor 4"),
        ({"kv_heads": 1}, "2 KV heads of 8, the descriptor 1 of 8"),
        ({"head_dim": 16}, "2 KV heads of 8, the descriptor 2 of 16"),
    ],
)
def test_the_descriptor_of_another_model_is_refused(changes, why):
    with pytest.raises(Unsupported, match=why):
        check_model(tiny_config(), descriptor(**changes))


def test_what_is_no_dynamic_layer_is_refused_with_the_reason():
    from transformers import MistralConfig

    config = MistralConfig(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    assert type(DynamicCache(config=config).layers[0]).__name__ != "DynamicLayer"
    with pytest.raises(Unsupported, match=r"layer 0 is a .*Sliding"):
        check_model(config, descriptor())
