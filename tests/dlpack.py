"""A tensor of another library."""

from __future__ import annotations

import numpy as np


class ByDlpack:
    """A tensor that shows nothing but the DLPack protocol, by its type as numpy asks for it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()
