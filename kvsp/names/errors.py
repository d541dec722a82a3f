"""What this package raises. Messages are for people; none holds a key or a token id."""

from __future__ import annotations

from kvsp.names.codes import DecodeErrorName


class KvspError(Exception):
    """Base of every exception this package raises."""


class DecodeError(KvspError):
    """An input is malformed or does not belong here.

    `name` is the one name the input has; `detail` says what is wrong and where, in
    words a person can act on. `pointer` is the JSON pointer (RFC 6901) of the member
    that is wrong, empty for a whole document and for what is not JSON.
    """

    def __init__(self, name: DecodeErrorName, detail: str, pointer: str = "") -> None:
        super().__init__(f"{name.value}: {detail}")
        self.name = name
        self.detail = detail
        self.pointer = pointer

    def within(self, where: str) -> DecodeError:
        """The same error with `where` (a file, a member) put before the detail."""
        return DecodeError(self.name, f"{where}: {self.detail}", self.pointer)


class ScopeFileError(KvspError):
    """A scope file cannot be read or written, or others than its owner may read it."""


class FileError(KvspError):
    """A file cannot be read or written, or is not what it should be.

    The message is one sentence that names the file and, where one is at fault, the tensor.
    """
