"""The algorithms by their names."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from moqt.quic.congestion.bbr import Bbr
from moqt.quic.congestion.controller import Controller
from moqt.quic.congestion.cubic import Cubic
from moqt.quic.congestion.reno import Reno


class Algorithm(StrEnum):
    """How much is sent at a time, and how fast."""

    BBR = "bbr"
    CUBIC = "cubic"
    RENO = "reno"


_MAKERS: dict[str, Callable[[int], Controller]] = {
    Algorithm.BBR: Bbr,
    Algorithm.CUBIC: Cubic,
    Algorithm.RENO: Reno,
}


def create_controller(algorithm: str, size: int) -> Controller:
    """A controller for packets of `size` octets. KeyError: there is no such algorithm."""
    return _MAKERS[algorithm](size)
