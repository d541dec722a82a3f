"""Tensors of others are taken without a copy: by DLPack here, torch's in `test_torch_tensors`."""

from __future__ import annotations

import numpy as np
import pytest

from kvsp.blocks.layout import to_layout_1
from kvsp.blocks.tensors import as_array
from tests.dlpack import ByDlpack


class Elsewhere(ByDlpack):
    """One in the memory of a graphics card."""

    def __dlpack__(self, **_):
        raise BufferError("it is on another device")


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_whatever_has_dlpack_is_the_same_octets_in_the_same_place(dtype: str) -> None:
    array = np.arange(24).astype(dtype).reshape(2, 3, 4)
    taken = as_array(ByDlpack(array))
    assert taken.dtype == array.dtype and taken.tobytes() == array.tobytes()
    assert np.shares_memory(taken, array)


def test_an_array_is_itself() -> None:
    array = np.zeros((1, 2, 3))
    assert as_array(array) is array


def test_what_is_none_or_elsewhere_is_said() -> None:
    with pytest.raises(
        ValueError, match="list is no tensor: neither an array, nor with __dlpack__"
    ):
        as_array([[1.0]])
    with pytest.raises(ValueError, match="not to be had as an array: it is on another device"):
        as_array(Elsewhere(np.zeros(3)))


def test_a_transposed_tensor_is_made_contiguous() -> None:
    heads_first = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    made = to_layout_1(ByDlpack(heads_first.swapaxes(0, 1)))
    assert made.flags.c_contiguous and np.array_equal(made, heads_first.swapaxes(0, 1))
