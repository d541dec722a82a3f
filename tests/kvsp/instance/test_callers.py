"""An instance asks whichever placement controller leads."""

from __future__ import annotations

from typing import Any

import pytest

from kvsp.client.caller import Answer
from kvsp.client.errors import (
    ClientError,
    ProblemDetails,
    RequestTimeoutError,
    UnreachableError,
    refusal,
)
from kvsp.instance.callers import (
    HttpPlacement,
    PlacementRefusedError,
    PlacementUnavailableError,
)
from kvsp.names.codes import InstanceState
from tests.kvsp.controller.support import status

P1, P2, P3 = (f"https://p{number}.example/kvsp/" for number in (1, 2, 3))
TIMEOUT_S = 6.0


class Controllers:
    """Stands for a Caller: what each controller answers, and who was asked."""

    http_loopback = False

    def __init__(self) -> None:
        self.answers: dict[str, ClientError] = {}
        self.asked: list[str] = []
        self.seconds: list[float] = []

    async def ask(self, method: str, source: str, path: str, **how: Any) -> Answer:
        self.asked.append(source)
        self.seconds.append(how["seconds"])
        if (error := self.answers.get(source)) is not None:
            raise error
        return Answer(source, 200, {}, b'{"state":"active"}')


def problem(status: int) -> ClientError:
    body = b'{"type":"about:blank","status":%d,"detail":"no"}' % status
    details = ProblemDetails.read(status, body, "application/problem+json", None, None)
    return refusal(P1, details)


@pytest.fixture
def controllers() -> Controllers:
    return Controllers()


def placement(controllers: Controllers, *uris: str) -> HttpPlacement:
    return HttpPlacement(uris, controllers, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "failure",
    [
        problem(503),
        UnreachableError(P1, "connection refused"),
        RequestTimeoutError(P1, "it stopped answering"),
    ],
)
async def test_one_that_does_not_lead_is_followed_by_the_next_which_is_asked_first_from_then_on(
    controllers: Controllers, failure: ClientError
) -> None:
    controllers.answers = {P1: failure}
    asking = placement(controllers, P1, P2)
    assert await asking.report(status()) is InstanceState.ACTIVE
    assert controllers.asked == [P1, P2]
    await asking.report(status())
    assert controllers.asked == [P1, P2, P2]


async def test_a_refusal_is_an_answer_and_asks_nobody_else(controllers: Controllers) -> None:
    controllers.answers = {P1: problem(409)}
    with pytest.raises(PlacementRefusedError):
        await placement(controllers, P1, P2).report(status())
    assert controllers.asked == [P1]


async def test_when_none_leads_each_is_asked_once(controllers: Controllers) -> None:
    controllers.answers = {P1: problem(503), P2: problem(503), P3: problem(503)}
    with pytest.raises(PlacementUnavailableError):
        await placement(controllers, P1, P2, P3).report(status())
    assert controllers.asked == [P1, P2, P3]


async def test_one_that_hangs_leaves_time_for_the_others(controllers: Controllers) -> None:
    controllers.answers = {P1: RequestTimeoutError(P1, "it stopped answering")}
    await placement(controllers, P1, P2, P3).report(status())
    assert 0 < controllers.seconds[0] <= TIMEOUT_S / 3
    assert controllers.seconds[1] <= TIMEOUT_S / 2
