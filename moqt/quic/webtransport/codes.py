"""How the application's 32-bit error codes travel in HTTP/3's ("Resetting Data Streams")."""

from __future__ import annotations

from moqt.quic.webtransport.h3 import H3Code
from moqt.values.codes import StreamErrorCode

FIRST_CODE = 0x52E4A40FA8DB
LAST_CODE = 0x52E5AC983162


def to_http_code(code: int) -> int:
    """The HTTP/3 error code that carries the application's 32-bit `code`."""
    return FIRST_CODE + code + code // 0x1E


def from_http_code(code: int) -> int:
    """The application's code; INTERNAL_ERROR for a code that carries none."""
    if not FIRST_CODE <= code <= LAST_CODE or (code - 0x21) % 0x1F == 0:
        return StreamErrorCode.INTERNAL_ERROR
    shifted = code - FIRST_CODE
    return shifted - shifted // 0x1F


def code_name(code: int) -> str:
    try:
        return f"HTTP/3 {H3Code(code).name}"
    except ValueError:
        return f"HTTP/3 error {code:#x}"
