"""Not found is said only of relays that can tell what is published."""

from __future__ import annotations

import pytest

from kvcs.finding import probing, searching
from kvcs.names.errors import NotFound, RetrievalError, RetrievalTimeout
from kvsp.names.identity import block_keys
from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode
from tests.kvcs.support import BLOCK, DESCRIPTOR, SCOPE, TOKENS, Link, collect, kv, produced

CACHE = kv()
WHY = "an upstream relay cannot be asked"
CODES = pytest.mark.parametrize("code", [RequestErrorCode.INTERNAL_ERROR, RequestErrorCode.TIMEOUT])


class Behind(Publisher):
    """A relay that lacks its upstream relay for so many answers: it refuses listings of what it has
    not, with `refuses`, or accepts them as if nothing were there."""

    def __init__(self, *publications, lacks=0, code=RequestErrorCode.INTERNAL_ERROR, refuses=True):
        super().__init__()
        self.statuses: list = []
        self.prefixes: list = []
        self.lacks, self.code, self.refuses = lacks, code, refuses
        for publication in publications:
            for store in publication.tracks:
                self.add_track(store)

    def _lacks(self, request) -> bool:
        self.lacks -= 1
        if self.lacks < 0:
            return False
        request.reject(self.code, WHY, retry_after_ms=20)
        return True

    def subscribe_namespace_received(self, request) -> None:
        self.prefixes.append(request.prefix)
        here = len(request.prefix) == 4 and any(
            name.namespace[:4] == request.prefix for name in self.tracks
        )
        if here or not self.refuses or not self._lacks(request):
            super().subscribe_namespace_received(request)

    def track_status_received(self, request) -> None:
        self.statuses.append(request.name)
        if not self._lacks(request):
            super().track_status_received(request)


@pytest.fixture
def impatient(monkeypatch) -> None:
    for module in (searching, probing):
        monkeypatch.setattr(module, "UNTOLD_SECONDS", 0.1)


async def fails(link, **settings) -> RetrievalError:
    with pytest.raises(RetrievalError) as caught:
        await collect(link.consumer(**settings))
    return caught.value


@pytest.mark.parametrize("discovery", ["listing", "probe"])
async def test_a_relay_that_tells_of_nothing_is_asked_once_whether_it_can_tell(discovery) -> None:
    served = Behind()
    async with Link(served) as link:
        assert type(await fails(link, discovery=discovery)) is NotFound
        (name,) = served.statuses
        assert name.namespace[:3] == (b"kvcs-1", SCOPE.scope_id, DESCRIPTOR.compat_id)
        assert name.namespace[3] not in block_keys(SCOPE, DESCRIPTOR, TOKENS), "it shows no token"
        await link.assert_clean()


async def test_who_is_told_of_a_publication_asks_for_nothing_more() -> None:
    served = Behind(produced(tokens=TOKENS[:BLOCK], cache=CACHE))
    async with Link(served) as link:
        await collect(link.consumer())
        assert served.statuses == []
        await link.assert_clean()


@CODES
@pytest.mark.parametrize("refuses", [False, True])
async def test_a_relay_that_cannot_tell_for_now_is_asked_again_until_it_can(code, refuses) -> None:
    served = Behind(lacks=3, code=code, refuses=refuses)
    async with Link(served) as link:
        assert type(await fails(link)) is NotFound
        assert served.lacks < 0
        await link.assert_clean()


@CODES
@pytest.mark.parametrize("discovery", ["listing", "probe"])
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.usefixtures("impatient")
async def test_of_a_relay_that_cannot_tell_for_long_nothing_is_said_not_to_be_found(
    code, discovery, refuses
) -> None:
    served = Behind(lacks=10**6, code=code, refuses=refuses)
    async with Link(served) as link:
        error = await fails(link, discovery=discovery)
        assert type(error) is RetrievalError and WHY in str(error)
        await link.assert_clean()


@pytest.mark.usefixtures("impatient")
async def test_what_a_relay_has_itself_is_found_though_it_cannot_tell_of_the_rest() -> None:
    served = Behind(produced(tokens=TOKENS[: 2 * BLOCK], cache=CACHE), lacks=10**6)
    async with Link(served) as link:
        consumer = link.consumer()
        await collect(consumer)
        assert consumer.stats.blocks == 2
        await link.assert_clean()


async def test_a_timeout_names_why_the_relay_has_not_told() -> None:
    async with Link(Behind(lacks=10**6)) as link:
        error = await fails(link, timeout=0.3)
        assert isinstance(error, RetrievalTimeout) and WHY in str(error)
        await link.assert_clean()
