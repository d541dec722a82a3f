"""Token ids, from whatever holds integers (KVSP 4.2)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvsp.names.codes import MAX_TOKEN_ID, DecodeErrorName
from kvsp.names.errors import DecodeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tokens: TypeAlias = "Sequence[int] | NDArray[Any]"
"""Token ids, each an integer from 0 to 2^32-1: Python's, numpy's or torch's, in a sequence, a
one-dimensional array or a tensor on the CPU."""


def check_tokens(tokens: Tokens) -> None:
    """Raise DecodeError `bad-token` unless every id is an integer from 0 to 2^32-1."""
    token_octets(tokens)


def token_list(tokens: Tokens) -> list[int]:
    """The ids as Python's integers. Raises DecodeError `bad-token` unless every one is an integer
    from 0 to 2^32-1."""
    octets = token_octets(tokens)
    return list(struct.unpack(f">{len(octets) // 4}I", octets))


def token_octets(tokens: Tokens) -> bytes:
    """The ids as uint32, big-endian, as Block Keys are computed over them (KVSP 4.2). Raises
    DecodeError `bad-token`."""
    # imported on first use: services that compare keys never compute any
    import numpy as np

    if hasattr(tokens, "__array__") and not isinstance(tokens, np.ndarray):
        try:
            tokens = np.asarray(tokens)
        except (RuntimeError, TypeError) as error:  # on another device, for example
            raise DecodeError(
                DecodeErrorName.BAD_TOKEN, f"token ids are not to be had as an array: {error}"
            ) from None
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            if tokens.ndim == 1 and not tokens.size:
                return b""
            raise DecodeError(
                DecodeErrorName.BAD_TOKEN, "token ids are a one-dimensional array of integers"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN_ID))
        if bad.size:
            raise _bad_token(int(bad[0]))
        return tokens.astype(">u4").tobytes()
    ids = list(tokens)
    if set(map(type, ids)) <= {int}:
        # nearly always: one pass without a look at each
        with contextlib.suppress(struct.error):
            return struct.pack(f">{len(ids)}I", *ids)
    return struct.pack(f">{len(ids)}I", *(_token_id(at, each) for at, each in enumerate(ids)))


def _token_id(position: int, token: Any) -> int:
    """An element of a sequence, also one that is a number of numpy or torch. Raises DecodeError."""
    import numpy as np

    if type(token) is not int:
        value = np.asarray(token) if hasattr(token, "__array__") else None
        if value is None or value.ndim or value.dtype.kind not in "iu":
            raise _bad_token(position)
        token = int(value)
    if not 0 <= token <= MAX_TOKEN_ID:
        raise _bad_token(position)
    return int(token)


def _bad_token(position: int) -> DecodeError:
    return DecodeError(
        DecodeErrorName.BAD_TOKEN,
        f"the token at position {position} is not an integer from 0 to {MAX_TOKEN_ID}",
    )
