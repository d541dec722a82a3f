"""Publishing the KV cache of a prompt, chunk of tokens by chunk ("Group ID", "Object ID").

publication = PromptPublication(descriptor, prompt, [Compression.FP16])
await publish(session, publication)
publication.put_tokens(layers)          # [(k, v) of each layer], of the next tokens
await aput_tokens(publication, layers)  # the same, beside others on the event loop
publication.finish()
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcs.names.errors import MisuseError
from kvcs.names.tracks import DEFAULT_CACHE_MS, TrackServer, end_group, end_track
from kvcs.simple.elements import encode_tokens
from kvcs.simple.names import CHUNK_TOKENS, Compression, PromptNamespace
from kvsp.blocks.layout import Tensor, check_tensor
from kvsp.blocks.tensors import as_array
from kvsp.names.identity import Descriptor
from moqt.track.store import TrackStore
from moqt.values.codes import PropertyType, PublishDoneCode
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location

Encoded: TypeAlias = Mapping[Compression, NDArray[np.uint8]]
"""The Objects of some tokens, for each compression `[tokens, octets of one]`."""


class PromptPublication:
    """The KV cache of a prompt, a track for each compression.

    Owns no I/O: it fills `tracks`, which any number of sessions serve. Tokens are put in order,
    any number at a time; each can be sent at once. What is published is encoded, and so a copy.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        prompt: bytes,
        compressions: Sequence[Compression] = (Compression.FP16,),
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        cache_ms: int = DEFAULT_CACHE_MS,
    ) -> None:
        """`descriptor` gives geometry, element type and the model's name; nothing else of it
        is told to anybody. Raises ValueError for a prompt or a setting that cannot be,
        DecodeError `codec-unsupported` for an element type that is not known.
        """
        if chunk_tokens < 1 or cache_ms < 1:
            raise ValueError("chunk_tokens and cache_ms are at least 1")
        if not compressions or len(set(compressions)) < len(compressions):
            raise ValueError("give one or more compressions, each once")
        descriptor.section_octets()
        self.descriptor = descriptor
        self.namespace = PromptNamespace(descriptor.model, prompt)
        self.chunk_tokens = chunk_tokens
        self.tokens = 0
        """Tokens put so far."""
        self.complete = False
        """Whether all is there and the tracks have ended."""
        properties = (KeyValue(PropertyType.MAX_CACHE_DURATION, cache_ms),)
        fields = self.namespace.fields
        self._stores = {
            each: TrackStore(FullTrackName(fields, each.track_name), properties)
            for each in compressions
        }
        self._ended = False

    @property
    def tracks(self) -> tuple[TrackStore, ...]:
        """The stores, to be served by any `moqt` Publisher."""
        return tuple(self._stores.values())

    def serve(self, publisher: TrackServer) -> None:
        """Serve every track by `publisher`."""
        for store in self.tracks:
            publisher.add_track(store)

    def withdraw(self, publisher: TrackServer) -> None:
        """Serve nothing by `publisher` any more; harmless when it does not."""
        for store in self.tracks:
            publisher.remove_track(store.name)

    def put_tokens(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Publish the next tokens: K and V of each layer, `[tokens, kv_heads, head_dim]` of the
        descriptor's element type, all of the same number of tokens.

        Raises MisuseError for arrays that do not fit, after the end, and for values that a
        compression cannot hold; nothing is published then.
        """
        self.put_encoded(self.encoded(layers))

    def encoded(self, layers: Sequence[tuple[Tensor, Tensor]]) -> Encoded:
        """What `put_encoded` publishes of the next tokens, the arguments being those of
        `put_tokens`. It takes some ms for each compression and MB: in whatever thread, while
        nothing else is put. Raises MisuseError as `put_tokens`."""
        if self._ended:
            raise MisuseError("the publication has ended")
        values = self._stacked(layers)
        try:
            return {each: encode_tokens(each, values, self.descriptor) for each in self._stores}
        except ValueError as error:
            raise MisuseError(f"tokens {self.tokens} and after: {error}") from None

    def put_encoded(self, encoded: Encoded) -> None:
        """Publish what `encoded` gave. Raises MisuseError after the end."""
        if self._ended:
            raise MisuseError("the publication has ended")
        for compression, rows in encoded.items():
            store = self._stores[compression]
            for number, row in enumerate(rows, self.tokens):
                group, object_id = divmod(number, self.chunk_tokens)
                store.append(group, object_id, row.data)
                if object_id + 1 == self.chunk_tokens:
                    end_group(store, Location(group, self.chunk_tokens))
        self.tokens += len(rows)

    def finish(self) -> None:
        """No further token will come. Raises MisuseError before the first one."""
        if self._ended:
            return
        if not self.tokens:
            raise MisuseError("there is no token to end with")
        self._ended = self.complete = True
        group, tokens = divmod(self.tokens, self.chunk_tokens)
        for store in self.tracks:
            if tokens:
                end_group(store, Location(group, tokens))
            end_track(store, group + (tokens > 0))

    def abandon(self, reason: str = "the publication was stopped") -> None:
        """Stop a publication that will not be completed; harmless after its end."""
        if self._ended:
            return
        self._ended = True
        for store in self.tracks:
            store.finish(PublishDoneCode.INTERNAL_ERROR, reason)

    def _stacked(self, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """`[tokens, layers, 2, kv_heads, head_dim]` of checked arrays."""
        if len(layers) != self.descriptor.layers:
            raise MisuseError(f"{len(layers)} layers instead of {self.descriptor.layers}")
        arrays: list[Tensor] = []
        for index, pair in enumerate(layers):
            for name, tensor in zip("kv", pair, strict=True):
                try:
                    arrays.append(as_array(tensor))
                    check_tensor(arrays[-1], self.descriptor)
                except ValueError as error:
                    raise MisuseError(f"layer {index}: {name}: {error}") from None
                tokens, due = len(arrays[-1]), len(arrays[0])
                if tokens != due:
                    raise MisuseError(f"layer {index}: {name} has {tokens} tokens instead of {due}")
        stacked = np.stack(arrays, axis=1)
        return stacked.reshape(len(stacked), len(layers), 2, *stacked.shape[2:])


async def aput_tokens(
    publication: PromptPublication, layers: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """`publication.put_tokens(layers)`, encoded in a thread: 4 MB in all compressions would hold
    the event loop for 70 ms. Nothing else may be put meanwhile. Raises as `put_tokens`, also when
    the publication was abandoned in between."""
    publication.put_encoded(await asyncio.to_thread(publication.encoded, layers))
