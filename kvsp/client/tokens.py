"""The bearer token that a server shows to others, in a file that may be replaced."""

from __future__ import annotations

import logging
import os

from kvsp.names.errors import FileError
from kvsp.principals import load_token

logger = logging.getLogger("kvsp.server")


class TokenFile:
    """A `Token` for a `Caller`: the file is read for each request, always by the same rule.

    While it cannot be used there is no token: `failures` counts the requests that are not
    sent, and the log says why, once until the reason is another one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises FileError when it cannot be used now."""
        self.path = os.fspath(path)
        self.failures = 0
        self._said = ""
        load_token(self.path)

    def __call__(self, source: str) -> str:
        """The token, the same for every service. Raises FileError."""
        try:
            token = load_token(self.path)
        except FileError as error:
            self.failures += 1
            if self._said != (why := str(error)):
                self._said = why
                logger.error(
                    "the token for other services cannot be read: %s; they are not asked until "
                    "that is mended",
                    why,
                )
            raise
        if self._said:
            self._said = ""
            logger.info("the token for other services can be read again")
        return token

    def usable(self) -> bool:
        """Whether there is a token now."""
        try:
            load_token(self.path)
        except FileError:
            return False
        return True
