"""Bearer tokens in files: never on a command line, never readable by others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moqt.values.codes import AliasType
from moqt.values.errors import MoqtError
from moqt.values.messages import AuthorizationToken
from moqt.wire.primitives import encode_token

MIN_TOKEN = 22
"""Characters: 128 random bits in base64url."""
MAX_TOKEN = 1024
OUT_OF_BAND = 0
"""The token type whose meaning both ends agreed on elsewhere (MOQT "Authorization Token")."""


class TokenFileError(MoqtError):
    """A token file cannot be used; the message names the file and never its content."""


def read_token_file(path: Path) -> bytes:
    """The token in `path`: one line of visible ASCII. Raises TokenFileError."""
    try:
        # a pipe must not hold the caller up, so it is looked at before it is read
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TokenFileError(f"{path}: not a regular file")
            if status.st_mode & 0o077:
                raise TokenFileError(
                    f"{path}: others than its owner have access "
                    f"(mode {stat.S_IMODE(status.st_mode):04o}); run: chmod 600 {path}"
                )
            token = file.read(MAX_TOKEN + 3).rstrip(b"\r\n")
    except OSError as error:
        raise TokenFileError(f"{path}: {error.strerror or error}") from None
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not all(
        0x21 <= octet <= 0x7E for octet in token
    ):
        raise TokenFileError(
            f"{path}: not a token, which is one line of {MIN_TOKEN} to {MAX_TOKEN} visible "
            f"ASCII characters"
        )
    return token


def bearer(token: bytes) -> bytes:
    """The Token structure that shows it, for `SessionConfig.setup_tokens`."""
    return encode_token(AuthorizationToken(AliasType.USE_VALUE, None, OUT_OF_BAND, token))
