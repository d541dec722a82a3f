"""What holders are asked for beside a publication that is retrieved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.retrieving.recovery.ends import LateError, ShorterError
from kvcs.retrieving.retrieval import Retrieval

if TYPE_CHECKING:  # HTTP is loaded by those who use it
    from kvcs.retrieving.fallback import HttpPath


def assist(path: HttpPath, retrieval: Retrieval, *, late: bool, hasty: bool, left: float) -> None:
    """Ask holders for what the publication does not bring, or not in time (`late`), within the
    seconds that are `left`. Raises what the destination raised, ShorterError for what holders do
    not have after all, and LateError when it is better to be `hasty` and take all from them."""
    assembly = retrieval.assembly
    if path.failure is not None:
        raise path.failure
    if path.busy or assembly.whole:
        return
    if path.blocks < assembly.total > assembly.blocks:
        raise ShorterError("holders do not have what is beyond the publication")
    for layer, block in list(assembly.promised):
        if block in assembly.foreign or not path.has(layer, block):
            assembly.promised.discard((layer, block))
            retrieval.ask_again(layer, assembly.segment_of(block))
    begun = path.begin_round(assembly, path.wanted(assembly, late), left)
    if late and not begun and assembly.foreign and hasty and path.blocks:
        raise LateError("what holders have is of another production than the publication")
