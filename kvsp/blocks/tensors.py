"""Tensors of others as numpy arrays, and back, without a copy.

numpy has bfloat16 and the 8-bit floats by `ml_dtypes` alone, which neither DLPack nor torch knows:
between them go the octets of such elements, as integers.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_TORCH: Final = "torch."
_AS_INTEGERS: Final = {
    "bfloat16": ("int16", np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
}
"""By the name that torch and ml_dtypes both have."""


def as_array(tensor: Any) -> NDArray[Any]:
    """A tensor in the memory of this machine as an array of the same octets: a numpy array itself,
    a torch tensor on the CPU of any element type, or whatever else has `__dlpack__`.

    Raises ValueError for anything else, and for a tensor of another device.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    try:
        if str(getattr(tensor, "dtype", "")).startswith(_TORCH):
            return _of_torch(tensor)
        if hasattr(tensor, "__dlpack__"):
            return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"the tensor is not to be had as an array: {error}") from None
    raise ValueError(f"{type(tensor).__name__} is no tensor: neither an array, nor with __dlpack__")


def to_torch(array: NDArray[Any]) -> Any:
    """An array as a torch tensor of the same octets and element type, bfloat16 and the 8-bit floats
    included: `to_torch(layer.k)`. Raises ImportError without torch."""
    import torch

    octets, _ = _AS_INTEGERS.get(array.dtype.name, (None, None))
    if octets is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(octets)).view(getattr(torch, array.dtype.name))


def _of_torch(tensor: Any) -> NDArray[Any]:
    plain = tensor.detach()
    octets, dtype = _AS_INTEGERS.get(str(tensor.dtype).removeprefix(_TORCH), (None, None))
    if octets is not None:
        plain = plain.view(getattr(sys.modules["torch"], octets))
    array: NDArray[Any] = plain.numpy()
    return array if dtype is None else array.view(dtype)
