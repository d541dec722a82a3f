"""The JSON text of a manifest, read and written piece by piece.

Nearly all of a long manifest are digests: 88 MB of 1,310,720 Objects, beside a few KiB. So they
are taken from the text as it arrives, as octets, and what is left is small enough to be read as
JSON at once; and a publisher writes the digests of a Group once, whatever the number of versions
that list them.
"""

from __future__ import annotations

import binascii
import re
import secrets
from collections.abc import Iterable
from typing import Any, Final

from kvcs.names.codes import (
    MANIFEST_BASE_OCTETS,
    MANIFEST_OBJECT_OCTETS,
    MANIFEST_SEGMENT_OCTETS,
    MAX_MANIFEST_FRAME_OCTETS,
    MAX_MANIFEST_OCTETS,
    MAX_SEGMENTS,
)
from kvcs.names.errors import KvcsError
from kvcs.names.limits import reached
from kvsp.blocks.layout import Octets
from kvsp.names import ijson
from kvsp.names.codes import HASH_OCTETS, DecodeErrorName
from kvsp.names.errors import DecodeError

WINDOW: Final = 256 << 10
"""Octets of a whole text that are looked at at once: two milliseconds."""

LEAST: Final = 4 << 10
"""Octets that are worth a look before the end."""

_SPACES: Final = 256
"""White space that may stand behind a digest before the comma."""

_SPACE = rb"[ \t\n\r]*+"
_DIGEST = rb'"[0-9a-f]{%d}"' % (2 * HASH_OCTETS)
_ROWS: Final = re.compile(b"(?:" + _DIGEST + _SPACE + b"," + _SPACE + b")++")
"""Digests that another item of their array follows."""
_LAST: Final = re.compile(_DIGEST + _SPACE + rb"(?=\])")
_FIRST: Final = re.compile(_DIGEST + _SPACE + rb"[,\]]")
_BEGUN: Final = re.compile(
    rb'"(?:[0-9a-f]{0,%d}+|[0-9a-f]{%d}"%s)' % (2 * HASH_OCTETS, 2 * HASH_OCTETS, _SPACE)
)
"""The beginning of a digest: whether it is one, what comes next tells."""
_NEXT: Final = re.compile(rb"\]%s,%s\[%s(?=\")" % (_SPACE, _SPACE, _SPACE))
"""From one array to the next one of the same array."""
_NEXT_BEGUN: Final = re.compile(rb"\]%s(?:,%s(?:\[%s)?)?" % (_SPACE, _SPACE, _SPACE))
_BETWEEN: Final = re.compile(rb'[^"]*+')
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_WHITE: Final = re.compile(_SPACE)
_BESIDE_DIGITS: Final = b'", \t\n\r'


def max_octets(objects: int, most: int = MAX_MANIFEST_OCTETS) -> int:
    """The most octets that the manifest of a publication may have which lists `objects` Objects;
    no more than `most` for any."""
    return min(most, MANIFEST_BASE_OCTETS + MANIFEST_OBJECT_OCTETS * objects)


def _max_frame(max_segments: int) -> int:
    """Octets beside its digests that a manifest of so many segments may have."""
    more = max(0, max_segments - MAX_SEGMENTS)
    return MAX_MANIFEST_FRAME_OCTETS + more * MANIFEST_SEGMENT_OCTETS


class ManifestReader:
    """One manifest, its text given with `feed` as it comes; `tree` has it as JSON values.

    Memory is what the digests take, 32 octets each, and the rest of the text, which has at most
    `MAX_MANIFEST_FRAME_OCTETS`, and more where more segments are read than by default.
    """

    def __init__(self, limit: int = MAX_MANIFEST_OCTETS, max_segments: int = MAX_SEGMENTS) -> None:
        """`limit` is how many octets the text may have."""
        self._max_frame = _max_frame(max_segments)
        self.octets = 0
        """Octets of the text so far."""
        self._limit = limit
        self._rest = bytearray()
        """What was not looked at, or has to be looked at with what follows it."""
        self._enough = LEAST
        self._frame = bytearray()
        """The text, with a mark in place of digests that follow each other."""
        self._before = b""
        """The last octet of it that is no white space."""
        self._mark = secrets.token_hex(8)  # not to be guessed by who writes the text
        self._runs: list[list[bytes]] = []
        """What the marks stand for: a part of an array, and arrays that follow it."""
        self._run: bytearray | None = None
        """Digests that follow each other, so far."""
        self._after = b""
        """What has come after the last of them."""
        self._fault: DecodeError | None = None

    def feed(self, part: Octets) -> None:
        """More of the text. What is wrong with it, `tree` says."""
        if self._fault is not None:
            return
        part = memoryview(part).cast("B")
        self.octets += len(part)
        if self.octets > self._limit:
            reached("max_manifest_octets", f"a manifest of over {self._limit} octets was not read")
            self._fail(f"larger than {self._limit} octets")
            return
        for at in range(0, len(part), WINDOW):
            self._rest += part[at : at + WINDOW]
            if len(self._rest) >= self._enough:
                self._look(last=False)

    def tree(self) -> Any:
        """The value of the whole text, as `ijson.loads` has it; but digests that follow each other
        in an array, strings of 64 lower-case hexadecimal digits, are one item: their octets.

        Raises DecodeError: `bad-manifest` for a text that is too large, else as `ijson.loads`.
        """
        self._look(last=True)
        if self._fault is not None:
            raise self._fault
        return self._resolved(ijson.loads(bytes(self._frame)))

    # -- inside --------------------------------------------------------------------------

    def _look(self, *, last: bool) -> None:
        text, at = bytes(self._rest), 0
        while at < len(text) and self._fault is None:
            end = self._take(text, at, last=last)
            if end is None:
                break
            at = end
        if last and self._run is not None:
            self._end_run()
        self._rest = bytearray(text[at:])
        # what could not be judged is looked at again when there is twice as much
        self._enough = max(LEAST, 2 * len(self._rest))
        most = self._max_frame
        if len(self._frame) + len(self._rest) > most + WINDOW or len(self._frame) > most:
            detail = f"more than {most} octets beside its digests"
            reached("max_segments", f"a manifest was not read: {detail}")
            self._fail(detail)

    def _take(self, text: bytes, at: int, *, last: bool) -> int | None:
        """Take the next part of the text; where it ends, None when more has to come first."""
        if self._run is not None:
            return self._go_on(text, at, last=last)
        end = _end(_BETWEEN, text, at)
        if end > at:
            self._keep(text[at:end])
            return end
        if self._before in (b"[", b","):
            if _FIRST.match(text, at):
                self._keep(b'"%s%d"' % (self._mark.encode(), len(self._runs)))
                self._runs.append([])
                self._run = bytearray()
                return at
            if not last and _may_become(_BEGUN, text, at):
                return None
        string = _STRING.match(text, at)
        if string is None and not last:
            return None
        end = len(text) if string is None else string.end()
        self._keep(text[at:end])
        return end

    def _keep(self, text: bytes) -> None:
        self._frame += text
        self._before = text.rstrip(b" \t\n\r")[-1:] or self._before

    def _go_on(self, text: bytes, at: int, *, last: bool) -> int | None:
        """Take what continues the digests that stand before it."""
        assert self._run is not None
        if self._run and not self._after:
            following = _NEXT.match(text, at)
            if following is not None:
                self._end_array()
                self._run, self._after = bytearray(), b"],["
                return following.end()
            if not last and _may_become(_NEXT_BEGUN, text, at):
                return None
            self._end_run()
            return at
        rows = _ROWS.match(text, at)
        if rows is not None:
            self._run += _octets(rows[0])
            self._after = b","
            return rows.end()
        if (end := _end(_WHITE, text, at)) > at:
            return end
        final = _LAST.match(text, at)
        if final is not None:
            self._run += _octets(final[0])
            self._after = b""
            return final.end()
        if not last and _may_become(_BEGUN, text, at):
            return None
        self._end_run()
        return at

    def _end_array(self) -> None:
        if self._run:
            self._runs[-1].append(bytes(self._run))

    def _end_run(self) -> None:
        self._end_array()
        self._keep(self._after)
        self._run, self._after = None, b""

    def _fail(self, detail: str) -> None:
        self._fault = self._fault or DecodeError(DecodeErrorName.BAD_MANIFEST, detail)
        self._rest.clear()
        self._frame.clear()
        self._runs.clear()
        self._run = None

    def _resolved(self, value: Any) -> Any:
        """The value with octets in place of the marks."""
        if isinstance(value, dict):
            return {name: self._resolved(member) for name, member in value.items()}
        if not isinstance(value, list):
            return value
        first, *more = self._arrays(value)
        if more:
            raise DecodeError(DecodeErrorName.NOT_I_JSON, "an array follows one that is no item")
        return first

    def _arrays(self, items: list[Any]) -> list[list[Any]]:
        """The array, and those that follow it, which a mark in it stands for as well."""
        arrays: list[list[Any]] = [[]]
        for item in items:
            if isinstance(item, list):
                arrays[-1] += self._arrays(item)
            elif isinstance(item, str) and item.startswith(self._mark):
                first, *more = self._runs[int(item[len(self._mark) :])]
                arrays[-1].append(first)
                arrays += [[each] for each in more]
            else:
                arrays[-1].append(self._resolved(item))
        return arrays


Text = Octets | ManifestReader
"""The text of a manifest, whole or read as it came."""


def with_strings(value: Any) -> Any:
    """A value of `ManifestReader.tree` with digests as strings, one item each."""
    if isinstance(value, dict):
        return {name: with_strings(member) for name, member in value.items()}
    if isinstance(value, list):
        items: list[Any] = []
        for item in value:
            items += hex_digests(item) if isinstance(item, bytes) else [with_strings(item)]
        return items
    return value


def hex_digests(octets: bytes) -> list[str]:
    """Digests that follow each other, as hexadecimal digits."""
    text = octets.hex()
    step = 2 * HASH_OCTETS
    return [text[at : at + step] for at in range(0, len(text), step)]


def group_text(digests: bytes) -> bytes:
    """The array of the digests of one Group, one at least, as it stands in a manifest."""
    return b'["%s"]' % binascii.hexlify(digests, b",", HASH_OCTETS).replace(b",", b'","')


class Written:
    """A canonical text with arrays in it that were written before, in pieces."""

    def __init__(
        self, max_segments: int = MAX_SEGMENTS, max_octets: int = MAX_MANIFEST_OCTETS
    ) -> None:
        """`max_segments` and `max_octets` are what its readers allow."""
        self._max_frame = _max_frame(max_segments)
        self._max_octets = max_octets
        self._mark = secrets.token_hex(8)
        self._texts: list[Iterable[bytes]] = []

    def put(self, items: Iterable[bytes]) -> str:
        """What stands in the tree for an array; `items` are its text between the brackets. What
        is put first stands first in the canonical text."""
        self._texts.append(items)
        return self._mark

    def pieces(self, tree: Any) -> list[bytes]:
        """The canonical octets of `tree`, in pieces.

        Raises KvcsError for more than consumers take.
        """
        frame, *rest = ijson.canonical(tree).split(b'"%s"' % self._mark.encode())
        octets = len(frame) + sum(map(len, rest))
        if octets > self._max_frame:
            reached("max_segments", f"a manifest of {octets} octets beside digests is not written")
            raise KvcsError(
                f"the manifest would have {octets} octets beside its digests, "
                f"{self._max_frame} are allowed; publish fewer segments"
            )
        pieces = [frame]
        for items, after in zip(self._texts, rest, strict=True):
            pieces[-1] += b"["
            pieces += items
            pieces.append(b"]" + after)
        octets = sum(map(len, pieces))
        if octets > self._max_octets:
            reached("max_manifest_octets", f"a manifest of {octets} octets is not written")
            raise KvcsError(
                f"the manifest would have {octets} octets, {self._max_octets} are allowed; "
                "publish larger blocks or fewer of them"
            )
        return pieces


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Where what `pattern` matches ends: it matches everywhere."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _may_become(begun: re.Pattern[bytes], text: bytes, at: int) -> bool:
    """Whether all of the text from `at` on is the beginning of what `begun` is for."""
    return len(text) - at <= 2 * HASH_OCTETS + _SPACES and begun.fullmatch(text, at) is not None


def _octets(rows: bytes) -> bytes:
    return binascii.unhexlify(rows.translate(None, _BESIDE_DIGITS))
