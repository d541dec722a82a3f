"""The algorithms by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from moqt.quic.congestion.bbr import Bbr
from moqt.quic.congestion.controller import Controller
from moqt.quic.congestion.cubic import Cubic
from moqt.quic.congestion.reno import Reno

Algorithm = Literal["bbr", "cubic", "reno"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

_MAKERS: dict[str, Callable[[int], Controller]] = {"bbr": Bbr, "cubic": Cubic, "reno": Reno}


def create_controller(algorithm: str, size: int) -> Controller:
    """A controller for packets of `size` octets. KeyError: there is no such algorithm."""
    return _MAKERS[algorithm](size)
