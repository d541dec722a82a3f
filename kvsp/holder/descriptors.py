"""The descriptors a holder knows, by Compatibility ID (KVSP "Compatibility Descriptor")."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor

logger = logging.getLogger("kvsp.holder")

_KNOWN: Final = 1024
_FILE_OCTETS: Final = 1 << 20


class Descriptors:
    """Given ones, those in a folder, and those the index has; each is checked against its ID."""

    def __init__(
        self,
        given: Iterable[Descriptor] = (),
        *,
        folder: Path | None = None,
        ask: Callable[[bytes], Awaitable[Descriptor | None]] | None = None,
    ) -> None:
        """`folder` keeps what the index was asked for, so that a restart needs no index."""
        self._known: OrderedDict[bytes, Descriptor] = OrderedDict(
            (each.compat_id, each) for each in given
        )
        self._folder = folder
        self._ask = ask

    async def get(self, compat_id: bytes) -> Descriptor | None:
        """The descriptor, None when nobody has it. Raises what `ask` raises."""
        if (known := self._known.get(compat_id)) is not None:
            self._known.move_to_end(compat_id)
            return known
        found = await uninterrupted(self._load, compat_id)
        if found is None and self._ask is not None:
            found = await self._ask(compat_id)
            if found is not None:
                await uninterrupted(self._save, found)
        if found is not None:
            self._known[compat_id] = found
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return found

    def _load(self, compat_id: bytes) -> Descriptor | None:
        if self._folder is None:
            return None
        path = self._folder / f"{compat_id.hex()}.json"
        try:
            with path.open("rb") as file:
                descriptor = Descriptor.parse(file.read(_FILE_OCTETS))
        except FileNotFoundError:
            return None
        except (OSError, DecodeError) as error:
            logger.warning("%s: %s; the index is asked instead", path, error)
            return None
        return descriptor if descriptor.compat_id == compat_id else None

    def _save(self, descriptor: Descriptor) -> None:
        if self._folder is None:
            return
        path = self._folder / f"{descriptor.compat_id.hex()}.json"
        # several may save the same at once
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                temporary.write_bytes(descriptor.jcs)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            logger.warning("%s: %s; after a restart the index is asked again", path, error)
