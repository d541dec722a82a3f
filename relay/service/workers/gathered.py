"""What the workers of a relay tell, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from relay.service.told.answers import Numbers, Query, limit_of, number_of

PREFIX = "kvcs_relay_"
LABEL = "worker"


class NotTold(Exception):
    """A worker has not answered: it is not there, or is behind."""


class Worker(Protocol):
    """One, as far as it is asked."""

    name: str
    up: bool
    restarts: int

    async def ask(self, what: str, query: Query) -> Any:
        """Its answer. Raises NotTold, and ValueError for a query that cannot be meant."""


class _Merged:
    """The series of all workers, each with whose it is."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


class Gathered:
    """The answers of all workers (`relay.service.told.answers.Answers`)."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        """The home is the first one."""
        self._workers = workers

    async def not_ready(self) -> str | None:
        for worker in self._workers:
            if not worker.up:
                return f"worker {worker.name} is not there; it is started again"
        try:
            why = await self._workers[0].ask("not_ready", {})
        except NotTold as error:
            return str(error)
        return None if why is None else str(why)

    async def numbers(self) -> Numbers:
        texts = await self._all("numbers", {})
        merged: dict[str, Metric] = {}
        for name, text in texts.items():
            for family in text_string_to_metric_families(text):
                into = merged.get(family.name)
                if into is None:
                    into = merged[family.name] = Metric(
                        family.name, family.documentation, family.type
                    )
                for sample in family.samples:
                    into.add_sample(sample.name, {**sample.labels, LABEL: name}, sample.value)
        return _Merged([*merged.values(), *self._own()])

    def _own(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(f"{PREFIX}worker_up", "1 while the worker serves.", labels=[LABEL])
        restarts = CounterMetricFamily(
            f"{PREFIX}worker_restarts", "Times that it was started again.", labels=[LABEL]
        )
        for worker in self._workers:
            up.add_metric([worker.name], worker.up)
            restarts.add_metric([worker.name], worker.restarts)
        return up, restarts

    async def tell(self, what: str, query: Query) -> dict[str, Any]:
        match what:
            case "tracks" | "sessions":
                return await self._pages(what, query)
            case "purge":
                return await self._purge(query)
        # publications as the home has them, and the upstream relays are its
        return dict(await self._home(what, query))

    async def _home(self, what: str, query: Query) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await self._workers[0].ask(what, query)
        except NotTold as error:
            raise ValueError(str(error)) from None
        return found

    async def _pages(self, what: str, query: Query) -> dict[str, Any]:
        """The entries of one worker after those of another."""
        limit, skip = limit_of(query), number_of(query, "after", 0)
        entries: list[dict[str, Any]] = []
        before = 0
        missing = []
        for worker in self._workers:
            asked = {
                **query,
                "limit": str(limit - len(entries)),
                "after": str(min(max(0, skip - before), 10**11)),
            }
            try:
                found = await worker.ask(what, asked)
            except NotTold:
                missing.append(worker.name)
                continue
            entries += [{LABEL: worker.name, **each} for each in found[what]]
            before += found["of"]
        told = {what: entries, "of": before, "after": skip + len(entries)}
        return {**told, "missing": missing} if missing else told

    async def _purge(self, query: Query) -> dict[str, Any]:
        """Edges first: they let go of what the home has."""
        edges = await self._all("purge", query, self._workers[1:])
        home = await self._home("purge", query)
        octets = home["octets"] + sum(each["octets"] for each in edges.values())
        used = max([home["in_use"], *(each["in_use"] for each in edges.values())])
        tracks = max([home["tracks"], *(each["tracks"] for each in edges.values())])
        return {"tracks": tracks, "octets": octets, "in_use": used}

    async def _all(
        self, what: str, query: Query, workers: Sequence[Worker] | None = None
    ) -> Mapping[str, Any]:
        """The answers of those that answer, by their names."""
        asked = self._workers if workers is None else workers

        async def one(worker: Worker) -> Any:
            try:
                return await worker.ask(what, query)
            except NotTold:
                return None

        found = await asyncio.gather(*(one(worker) for worker in asked))
        told = zip(asked, found, strict=True)
        return {worker.name: answer for worker, answer in told if answer is not None}
