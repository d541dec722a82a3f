"""Which blocks of a publication are the consumer's, where its manifest cannot tell all of it.

A publication that goes on with other tokens has a `block_keys_sha256` that nobody can compute who
knows fewer. Then the records of an index service bind its blocks to keys, by their layer digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcs.names.manifest import Manifest
from kvsp.names.codes import Codec, DecodeErrorName
from kvsp.names.errors import DecodeError

if TYPE_CHECKING:
    from kvsp.records.records import ReplicaRecord


def of_ours(
    manifest: Manifest,
    anchor_key: bytes,
    keys: Sequence[bytes],
    records: Sequence[ReplicaRecord],
) -> tuple[int, dict[int, Sequence[bytes]]]:
    """How many leading blocks have our `keys` as the manifest shows it, and the layer digests of
    those after them that the index service has `records` of, by block.

    Raises DecodeError `keys-mismatch` when neither shows anything.
    """
    # a publication that goes on with other tokens: the manifest cannot show where
    known = keys if anchor_key in keys else keys[: len(records)]
    confirmed = manifest.check_keys(known, anchor_key)
    bound: dict[int, Sequence[bytes]] = {}
    for block in range(confirmed, len(records)):
        record = records[block]
        if record.codec != Codec.RAW or record.layer_digests is None:
            break
        bound[block] = record.layer_digests
    if not confirmed and not bound:
        raise DecodeError(
            DecodeErrorName.KEYS_MISMATCH,
            "it has more blocks than there are tokens, and no record of an index service "
            "shows which of them are theirs",
        )
    return confirmed, bound
