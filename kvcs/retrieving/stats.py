"""What a retrieval says of itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kvcs.names.errors import VerificationFailed
from kvcs.names.namespace import PublicationNamespace

NOT_NEEDED: Final = "not-needed"
"""Why an Object was discarded that is outside the layers and blocks asked for."""

OTHER_TOKENS: Final = "other-tokens"
"""Why an Object was discarded that is not what the index service has a record of."""

OTHER_PRODUCTION: Final = "other-production"
"""Why a block of a holder was discarded that is right, but not the one of the publication."""

RESUMED: Final = "resumed"
"""The source of what was there already, from an earlier retrieval."""


class BadObjects:
    """Bad Objects and manifests of one publication, by what is wrong with them."""

    def __init__(self, publication: str, most: int) -> None:
        """`most` are borne of `publication`, which is named so in words."""
        self._publication = publication
        self._most = most
        self.reasons: Counter[str] = Counter()

    def __str__(self) -> str:
        reasons = ", ".join(f"{name} {count}" for name, count in self.reasons.items())
        return f"{self._publication}: {self.reasons.total()} bad Objects ({reasons})"

    def count(self, reason: str) -> None:
        """One more. Raises VerificationFailed for one too many."""
        self.reasons[reason] += 1
        if self.reasons.total() > self._most:
            raise VerificationFailed(str(self))


class Mode(StrEnum):
    """How a publication is retrieved."""

    AUTO = "auto"
    """By FETCH when the manifest marks it complete, else live."""
    LIVE = "live"
    """By subscriptions with fills, which also bring what is still to be produced."""
    FETCH = "fetch"


@dataclass(slots=True)
class Stats:
    """What a retrieval did. Counts of one publication, except where said otherwise."""

    tokens: int = 0
    blocks: int = 0
    layers: int = 0
    """Layers handed over, of the segment handed over last."""

    whole_blocks: int = 0
    """Leading blocks of which every layer was handed over: those of whole segments."""

    segments: int = 0
    """Segments of which a layer was handed over."""

    octets: int = 0
    """Octets of verified sections, decoded."""

    seconds: float = 0.0
    """From the start to the end, over all publications tried."""

    first_layer_seconds: float | None = None
    """From the start to the first usable layer."""

    layer_seconds: list[float] = field(default_factory=list)
    """From the start to each usable layer, in order; with a second publication that begins
    anew, its layers follow."""

    objects_verified: int = 0
    objects_confirmed: int = 0
    """Verified Objects whose digest a manifest lists."""

    objects_resumed: int = 0
    """Objects that were there already, from an earlier retrieval."""

    discarded: Counter[str] = field(default_factory=Counter)
    """Objects and manifests thrown away, by reason, over all publications."""

    duplicates: int = 0
    """Objects that came more often than they were asked for, over all publications."""

    recoveries: int = 0
    """FETCH requests for missing Objects, over all publications."""

    publications_tried: int = 0
    """Publications whose manifest was asked for."""

    publication: str | None = None
    """Publication ID, hexadecimal."""

    source: str | None = None
    """Whom it came from, as the caller names it."""

    packet_octets: int = 0
    """UDP payload of the largest packet that came: what the path from the relay carries. 0 when
    nothing came from one."""

    codecs: list[str] = field(default_factory=list)
    """The codecs that its Objects came in; empty when everything came from holders."""
    layers_by_connection: list[int] = field(default_factory=list)
    """Layers that each of several connections brought, the first one's first; empty where one
    had all."""

    connections_error: str | None = None
    """Why there are fewer connections than asked for."""

    mode: str | None = None
    """`live` or `fetch`; None when no publication was asked for data."""

    first_layer: int = 0
    over_http: dict[tuple[int, int], str] = field(default_factory=dict)
    """The holder that a (block, layer) came from, over HTTP, at least in part."""

    resumed: set[tuple[int, int]] = field(default_factory=set)
    """Each (block, layer) that was there already, at least in part."""

    note: str | None = None
    """What is to be said of the index service: that it did not answer, for example."""

    relay_error: str | None = None
    """Why the relay could not be asked, when everything came without it."""

    @property
    def megabytes_per_second(self) -> float:
        return self.octets / self.seconds / 1e6 if self.seconds else 0.0

    def begin(self, namespace: PublicationNamespace) -> None:
        """A publication is retrieved."""
        self.publication = namespace.publication_id.hex()
        self._reset()

    def begin_over_http(self) -> None:
        """Everything is taken from holders over HTTP."""
        self.publication = None
        self._reset()

    def _reset(self) -> None:
        self.mode = None
        self.codecs = []
        self.tokens = self.blocks = self.layers = self.octets = 0
        self.whole_blocks = self.segments = 0
        self.objects_verified = self.objects_confirmed = self.objects_resumed = 0
        self.resumed.clear()

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Where the layers handed over came from: ranges of blocks and layers, inclusive."""
        spans: list[dict[str, Any]] = []
        runs: list[tuple[int, int, str | None]] = []
        for block in range(self.whole_blocks or (self.blocks if self.layers else 0)):
            previous, runs = runs, self._runs(block)
            if runs == previous:
                for span in spans[-len(runs) :]:
                    span["blocks"][1] = block
                continue
            spans += [
                {"blocks": [block, block], "layers": [first, last], "source": source}
                for first, last, source in runs
            ]
        return spans

    def _runs(self, block: int) -> list[tuple[int, int, str | None]]:
        runs: list[tuple[int, int, str | None]] = []
        for layer in range(self.first_layer, self.first_layer + self.layers):
            source = self._source_beside(block, layer) or self.source
            if runs and runs[-1][2] == source:
                runs[-1] = (runs[-1][0], layer, source)
            else:
                runs.append((layer, layer, source))
        return runs

    def _source_beside(self, block: int, layer: int) -> str | None:
        """Where a layer of a block came from; None when all of it is from the publication."""
        if (block, layer) in self.resumed:
            return RESUMED
        return self.over_http.get((block, layer))

    def described_sources(self) -> str:
        """For people: `12 blocks by moqt, 3 by https://h1.example/kvsp/`."""
        layers = range(self.first_layer, self.first_layer + self.layers)
        ways: Counter[str] = Counter()
        for block in range(self.whole_blocks or self.blocks):
            names = {self._source_beside(block, layer) or "moqt" for layer in layers}
            ways[" and ".join(sorted(names, key=lambda name: (name != "moqt", name)))] += 1
        parts = [f"{count} by {way}" for way, count in ways.items()]
        if parts:
            first, _, rest = parts[0].partition(" ")
            parts[0] = f"{first} block{'' if first == '1' else 's'} {rest}"
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """A JSON object with every number."""
        return {
            "tokens": self.tokens,
            "blocks": self.blocks,
            "layers": self.layers,
            "whole_blocks": self.whole_blocks,
            "segments": self.segments,
            "octets": self.octets,
            "seconds": round(self.seconds, 6),
            "megabytes_per_second": round(self.megabytes_per_second, 3),
            "layer_seconds": [round(seconds, 6) for seconds in self.layer_seconds],
            "first_layer_seconds": self.first_layer_seconds and round(self.first_layer_seconds, 6),
            "objects_verified": self.objects_verified,
            "objects_confirmed": self.objects_confirmed,
            "objects_resumed": self.objects_resumed,
            "discarded": dict(self.discarded),
            "duplicates": self.duplicates,
            "recoveries": self.recoveries,
            "publications_tried": self.publications_tried,
            "publication": self.publication,
            "source": self.source,
            "packet_octets": self.packet_octets,
            "layers_by_connection": self.layers_by_connection,
            "connections_error": self.connections_error,
            "mode": self.mode,
            "codecs": self.codecs,
            "sources": self.sources,
            "note": self.note,
            "relay_error": self.relay_error,
        }
