"""torch tensors as arrays and back, no octet copied; needs the extra `torch`."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")

import torch

from kvcs import ArrayDestination, Publication, to_torch
from kvsp.blocks.layout import to_layout_1
from kvsp.blocks.tensors import as_array
from kvsp.names.errors import DecodeError
from kvsp.names.identity import block_keys
from kvsp.names.tokens import token_list
from moqt.publisher import Publisher
from tests.kvcs.support import BLOCK, DESCRIPTOR, SCOPE, TOKENS, Link, descriptor, kv, publisher

TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@pytest.mark.parametrize("name", TYPES)
def test_a_tensor_of_any_element_type_goes_there_and_back_without_a_copy(name: str) -> None:
    described = descriptor(kv_dtype=name)
    array, _ = kv(described)[0]
    tensor = to_torch(array)
    assert tensor.dtype is TYPES[name] and tuple(tensor.shape) == array.shape
    assert tensor.data_ptr() == array.ctypes.data
    back = as_array(tensor)
    assert back.dtype == array.dtype and back.tobytes() == array.tobytes()
    assert np.shares_memory(back, array)


def test_one_that_is_differentiated_is_taken_as_it_is() -> None:
    tensor = torch.ones(2, 3, 4, requires_grad=True)
    assert as_array(tensor).sum() == 24


def test_one_with_the_heads_first_is_made_contiguous() -> None:
    tensor = torch.arange(24.0).to(torch.bfloat16).reshape(3, 2, 4).transpose(0, 1)
    made = to_layout_1(tensor)
    assert made.flags.c_contiguous and made.dtype == DESCRIPTOR.dtype
    assert torch.equal(to_torch(made), tensor)


async def test_tensors_are_published_and_received() -> None:
    cache = [(to_torch(k), to_torch(v)) for k, v in kv()]
    publication = Publication(SCOPE, DESCRIPTOR, torch.tensor(TOKENS))
    for layer, (k, v) in enumerate(cache):
        publication.put_layer(layer, k, v)
    into = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in cache]
    async with Link(publisher(publication)) as link:
        destination = ArrayDestination(dict(enumerate(into)))
        consumer = link.consumer(tokens=torch.tensor(TOKENS), destination=destination)
        async with consumer:
            async for layer in consumer.layers():
                received = to_torch(layer.k)
                assert received.data_ptr() == into[layer.index][0].data_ptr()
                wanted = cache[layer.index][0]
                assert torch.equal(received.view(torch.int16), wanted.view(torch.int16))


def test_token_ids_of_torch_name_the_same_blocks() -> None:
    keys = block_keys(SCOPE, DESCRIPTOR, TOKENS)
    for dtype in (torch.int32, torch.int64, torch.int16):
        tokens = torch.tensor(TOKENS, dtype=dtype)
        assert block_keys(SCOPE, DESCRIPTOR, tokens) == keys
        assert token_list(list(tokens)) == TOKENS
    for wrong in (torch.ones(BLOCK), torch.ones(BLOCK, dtype=torch.bool), torch.tensor([[1]])):
        with pytest.raises(DecodeError, match="one-dimensional array of integers"):
            block_keys(SCOPE, DESCRIPTOR, wrong)
        with pytest.raises(DecodeError, match="position 0 is not an integer"):
            block_keys(SCOPE, DESCRIPTOR, list(wrong))


def test_a_growing_publication_is_extended_by_tensors() -> None:
    publication = Publication(SCOPE, DESCRIPTOR, torch.tensor(TOKENS[: BLOCK + 1]), growing=True)
    publication.serve(Publisher())
    for layer, (k, v) in enumerate(kv()):
        publication.put_layer(layer, k, v)
    assert publication.extend(torch.tensor(TOKENS[BLOCK + 1 :])) == len(TOKENS) // BLOCK - 1
