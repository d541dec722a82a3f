"""The checks a client makes of a retrieved container (KVSP "Block Retrieval and Storage").

Sans-IO: fields and octets of an answer go in, verified layers come out. Repr-Digest is
always required and checked; layer digests, and the replica digest when all layers were
retrieved, when the codec is the replica's. What only the end of an answer proves is held
back until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvsp.blocks.container import (
    ContainerHeader,
    ContainerReader,
    LayerSections,
    parse_repr_digest,
)
from kvsp.blocks.layout import Octets, Tensor, section_tensor
from kvsp.client.errors import VerificationError
from kvsp.names.codes import BLOCK_MEDIA_TYPE
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.records.records import ReplicaRecord, replica_digest


class Layer(NamedTuple):
    """A verified layer of a block: K and V as raw octets (layout "kvsp-layout-1")."""

    block: int
    """Index of the block among those asked for."""

    layer: int
    k: memoryview
    v: memoryview
    source: str
    """Base URI of the holder it came from."""

    def tensors(self, descriptor: Descriptor) -> tuple[Tensor, Tensor]:
        """K and V as `[block_tokens, kv_heads, head_dim]`, views of the octets."""
        return section_tensor(self.k, descriptor), section_tensor(self.v, descriptor)


class BlockReceiver:
    """Takes one answer to a GET of a block and gives its layers as soon as they are proven."""

    def __init__(
        self,
        source: str,
        descriptor: Descriptor,
        fields: Mapping[str, str],
        *,
        layers: range | None = None,
        codec: int | None = None,
        record: ReplicaRecord | None = None,
    ) -> None:
        """`fields` are the answer's header fields. `layers` and `codec` are what was asked
        for, None where the holder chose: then all layers, in its replica's codec. Without
        a `record` everything is held back to the end.

        Raises VerificationError for an answer without a usable Repr-Digest, of another
        media type or with a content coding.
        """
        self._source = source
        self._layers = range(descriptor.layers) if layers is None else layers
        self._codec = codec
        self._record = record
        self._held_back: list[LayerSections] = []
        self._digests: list[bytes] = []
        self._descriptor = descriptor
        self.octets = 0
        # a record that is not in itself right proves nothing
        digests = record.layer_digests if record is not None else None
        if (
            record is not None
            and digests is not None
            and (len(digests) != descriptor.layers or replica_digest(digests) != record.digest)
        ):
            raise VerificationError(source, "the Replica Record's digests contradict each other")
        self._early = record is not None and digests is not None and codec == record.codec
        self._reader = ContainerReader(
            descriptor,
            layer_digests=digests if self._early else None,
            codec=codec if self._early else None,
            repr_digest=self._repr_digest(fields),
            total_octets=_length(fields),
        )

    def feed(self, data: Octets) -> list[LayerSections]:
        """Take the next octets; the layers they prove. Raises VerificationError."""
        self.octets += len(data)
        proven: list[LayerSections] = []
        try:
            for event in self._reader.feed(data):
                if isinstance(event, ContainerHeader):
                    self._check_header(event)
                    continue
                self._digests.append(event.digest)
                (proven if self._early else self._held_back).append(event)
        except DecodeError as error:
            raise self._bad(error) from None
        return proven

    def close(self) -> list[LayerSections]:
        """The answer ended; the layers that this proves. Raises VerificationError."""
        try:
            self._reader.close()
        except DecodeError as error:
            raise self._bad(error) from None
        record, header = self._record, self._reader.header
        assert header is not None
        whole = len(self._digests) == self._descriptor.layers
        if (
            record is not None
            and header.codec == record.codec
            and whole
            and replica_digest(self._digests) != record.digest
        ):
            raise VerificationError(self._source, "the block is not what its record covers")
        held_back, self._held_back = self._held_back, []
        return held_back

    @property
    def codec(self) -> int | None:
        """The codec of the container, once its header was read."""
        header = self._reader.header
        return None if header is None else header.codec

    def _check_header(self, header: ContainerHeader) -> None:
        if header.layers != self._layers:
            raise VerificationError(
                self._source,
                f"layers {header.layers.start}-{header.layers.stop - 1} came instead of "
                f"{self._layers.start}-{self._layers.stop - 1}",
            )
        if self._codec is not None and header.codec != self._codec:
            raise VerificationError(
                self._source, f"codec {header.codec:d} came instead of {self._codec}"
            )

    def _repr_digest(self, fields: Mapping[str, str]) -> bytes:
        media_type = fields.get("Content-Type", "").partition(";")[0].strip().lower()
        if media_type != BLOCK_MEDIA_TYPE:
            raise VerificationError(self._source, f"the answer is not {BLOCK_MEDIA_TYPE}")
        if fields.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise VerificationError(self._source, "the answer has a content coding")
        try:
            digest = parse_repr_digest(fields.get("Repr-Digest", ""))
        except DecodeError as error:
            raise self._bad(error) from None
        if digest is None:
            raise VerificationError(self._source, "the answer has no sha-256 Repr-Digest")
        return digest

    def _bad(self, error: DecodeError) -> VerificationError:
        return VerificationError(self._source, f"{error.name}: {error.detail}")


def _length(fields: Mapping[str, str]) -> int | None:
    text = fields.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
