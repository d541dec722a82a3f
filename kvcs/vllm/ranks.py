"""The KV heads of tensor-parallel ranks: which of them a rank has, and all of them put together.

With more ranks than KV heads each head is on several ranks (vLLM replicates it); on the wire there
is each head once, and every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """The KV heads that rank `rank` of `ranks` has, of `heads` of the model.

    Raises ValueError when they do not divide: vLLM refuses that as well.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is none of {ranks}")
    if ranks <= heads:
        if heads % ranks:
            raise ValueError(f"{heads} KV heads are not shared out evenly among {ranks} ranks")
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % heads:
        raise ValueError(f"{heads} KV heads are not replicated evenly on {ranks} ranks")
    head = rank // (ranks // heads)
    return range(head, head + 1)


def check_heads(rank: int, ranks: int, heads: int, local: int) -> range:
    """The same, held against the heads that the rank's own cache has. Raises ValueError when that
    is another number: then the offsets would be wrong."""
    mine = heads_of(rank, ranks, heads)
    if local != len(mine):
        raise ValueError(
            f"rank {rank} of {ranks} has a cache of {local} KV heads, and {len(mine)} of the "
            f"model's {heads} belong there"
        )
    return mine


def assemble(parts: Sequence[Any], heads: int) -> Any:
    """K or V of all heads, `[tokens, heads, head_dim]`, from those of every rank in order.

    A replicated head is taken from its first rank. Raises ValueError when a head would be missing
    or a rank has others than it should.
    """
    ranks = len(parts)
    first: dict[int, Any] = {}
    for rank, part in enumerate(parts):
        mine = check_heads(rank, ranks, heads, part.shape[1])
        for index, head in enumerate(mine):
            first.setdefault(head, part[:, index])
    if sorted(first) != list(range(heads)):
        raise ValueError(f"of {heads} KV heads only {sorted(first)} are on the ranks")
    if ranks == 1:
        return parts[0]
    return np.stack([first[head] for head in range(heads)], axis=1)
