"""Bearer tokens in files: never on a command line, never readable by others."""

from __future__ import annotations

from pathlib import Path

from moqt.private_files import PrivateFileError, read_private
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


def read_token_file(path: Path, *, pipes: bool = False) -> bytes:
    """The token in `path`, a file or with `pipes` a pipe: one line of visible ASCII. Raises
    TokenFileError."""
    try:
        token = read_private(path, MAX_TOKEN + 3, pipes=pipes).rstrip(b"\r\n")
    except PrivateFileError as error:
        raise TokenFileError(str(error)) from None
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
