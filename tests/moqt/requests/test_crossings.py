"""Whatever crosses whatever on a request stream, both ends come to the same, and keep nothing.

Every pair that `crossings` names, and every end of a stream beside it, is walked with two sessions:
both sides say it before either hears the other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from moqt.requests import REQUEST_TABLE, RequestState, Stage, crossings
from moqt.session import SessionHandler
from moqt.track.store import TrackStore
from moqt.values.codes import MessageType, ObjectStatus, PublishDoneCode, RequestErrorCode
from moqt.values.errors import MisuseError, RequestError
from moqt.values.messages import Parameters, PublishDone, PublishStateNotify
from moqt.values.names import FullTrackName, Location
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import NAME, Collector

M = MessageType
RESET, FIN, FETCHED = "RESET", "FIN", "the end of the fetch"
PREFIX = NAME.namespace[:1]
NO = RequestError(RequestErrorCode.UNAUTHORIZED, "no")


class Keeps(SessionHandler):
    """Keeps the one request that comes; the test answers."""

    request = None

    def subscribe_received(self, request):
        self.request = request

    publish_received = fetch_received = track_status_received = subscribe_received
    publish_namespace_received = subscribe_namespace_received = subscribe_received
    subscribe_tracks_received = subscribe_received


class World:
    """One request, up to the stages where the two messages are said."""

    def __init__(self, opening: MessageType, asks_is_client: bool, answering: Stage) -> None:
        self.opening = opening
        handlers = Keeps(), Keeps()
        self.pair = Pair(*handlers)
        sessions = self.pair.client, self.pair.server
        transports = self.pair.client_transport, self.pair.server_transport
        ours, theirs = (0, 1) if asks_is_client else (1, 0)
        self.sessions = self.asks, self.answers = sessions[ours], sessions[theirs]
        self.far_transport = transports[theirs]
        self.collector = Collector()
        self.heard: list[list] = []
        """The answers that each REQUEST_UPDATE got."""
        self.store = TrackStore(NAME)
        if opening is M.FETCH:
            self.publish()
            self.finish_track()
            self.far_transport.max_streams = 0  # so that the fetch goes on until it is let
        self.request = self._ask()
        self.pair.run()
        self.theirs = handlers[theirs].request
        if answering is Stage.TALKING:
            self.accept()
            self.pair.run()
        if opening in (M.SUBSCRIBE, M.PUBLISH) and answering is Stage.TALKING:
            self.publish()

    def _ask(self):
        asks, none = self.asks, lambda *_: None
        match self.opening:
            case M.SUBSCRIBE:
                return asks.subscribe(NAME, self.collector)
            case M.PUBLISH:
                return asks.publish(self.store)
            case M.FETCH:
                return asks.fetch(NAME, self.collector)
            case M.TRACK_STATUS:
                return asks.track_status(NAME)
            case M.PUBLISH_NAMESPACE:
                return asks.publish_namespace(PREFIX, on_ended=none)
            case M.SUBSCRIBE_NAMESPACE:
                return asks.subscribe_namespace(PREFIX, on_namespace=none, on_ended=none)
            case M.SUBSCRIBE_TRACKS:
                return asks.subscribe_tracks(PREFIX, on_publish=none, on_ended=none)
        raise AssertionError(self.opening)

    # -- what is said ----------------------------------------------------------------------

    def accept(self) -> None:
        match self.opening:
            case M.SUBSCRIBE | M.FETCH | M.TRACK_STATUS:
                self.theirs.accept(self.store)
            case M.PUBLISH:
                self.theirs.accept(self.collector)
            case _:
                self.theirs.accept()

    def publish(self) -> None:
        for group, object_id in product(range(2), range(3)):
            self.store.append(group, object_id, [b"octets"])

    def finish_track(self) -> None:
        for group in range(2):
            self.store.finish_subgroup(group, 0)
        self.store.mark_end(Location(2, 0), ObjectStatus.END_OF_TRACK)
        self.store.finish_subgroup(2, 0)
        self.store.finish(PublishDoneCode.TRACK_ENDED)

    def update(self, request) -> None:
        changes = {} if request is self.request and self.opening is M.PUBLISH else PRIORITY
        if self.opening not in (M.SUBSCRIBE, M.PUBLISH, M.FETCH):
            changes = {}
        self.heard.append([])
        request.update(Parameters(**changes), self.heard[-1].append)

    def hold_an_update(self, sender, receiver) -> None:
        """One that `receiver` is to answer while something else is on its way."""
        receiver.updates.gate = lambda request, update: False
        self.update(sender)
        self.pair.run()
        receiver.updates.gate = None

    def say(self, kind, *, requester: bool, other: Stage) -> None:
        request = self.request if requester else self.theirs
        match kind:
            case M.REQUEST_UPDATE:
                self.update(request)
            case M.GOAWAY:
                request.send_goaway()
            case M.REQUEST_OK if self.held:
                request.apply_held_updates()
            case M.REQUEST_ERROR if self.held:
                request.updates.release()
                request.update_failed(NO)
            case M.REQUEST_OK | M.SUBSCRIBE_OK | M.FETCH_OK:
                self.accept()
            case M.REQUEST_ERROR:
                request.reject(RequestErrorCode.UNAUTHORIZED, "no")
            case M.PUBLISH_STATE_NOTIFY:
                request.stream.send(PublishStateNotify(Parameters(forward=1)))
            case M.PUBLISH_DONE if other is Stage.TALKING:
                self.finish_track()
                if self.opening is M.PUBLISH:
                    request.delivery.done_waits = False
                    request.delivery.check_done()
            case M.PUBLISH_DONE:
                request.stream.send(PublishDone(PublishDoneCode.TRACK_ENDED, 0, ""), fin=True)
                request.done_sent()
            case M.NAMESPACE:
                request.add((*PREFIX, b"a"))
            case M.NAMESPACE_DONE:
                request.add((*PREFIX, b"b"))
                request.remove((*PREFIX, b"b"))
            case M.PUBLISH_SKIPPED:
                request.skip(FullTrackName((*PREFIX, b"a"), b"t"))
            case _ if kind == FETCHED:
                self.far_transport.max_streams = 128
            case _ if kind == RESET:
                request.cancel() if hasattr(request, "cancel") else request.revoke()
            case _ if kind == FIN:
                request.stream.finish()
            case _:
                raise AssertionError(f"nothing says {kind!r}")

    held = False


PRIORITY = {"subscriber_priority": 7}
ANSWERS_AN_UPDATE = (M.REQUEST_OK, M.REQUEST_ERROR)


def cells():
    """Opening, stage of the answering side, what the requester says, what the answering says."""
    for opening in sorted(REQUEST_TABLE):
        pairs = {(c.answering, c.said, c.answered) for c in crossings(opening)}
        for stage, said, answered in {
            *pairs,
            *((s, kind, end) for s, kind, _ in pairs for end in (RESET, FIN)),
            *((s, end, kind) for s, _, kind in pairs for end in (RESET, FIN)),
            *((s, a, b) for s, _, _ in pairs for a in (RESET, FIN) for b in (RESET, FIN)),
            *((Stage.TALKING, kind, FETCHED) for s, kind, _ in pairs if opening is M.FETCH),
            *((Stage.TALKING, end, FETCHED) for end in (RESET, FIN) if opening is M.FETCH),
        }:
            if opening is M.TRACK_STATUS and stage is Stage.TALKING:
                continue  # the answer was its end
            if stage is Stage.SILENT and said in ANSWERS_AN_UPDATE:
                continue  # of an update that cannot have been sent
            if opening is M.TRACK_STATUS and answered == FIN:
                continue  # both directions would have ended, without an answer
            yield opening, stage, said, answered


def name(cell) -> str:
    opening, stage, *said = cell
    return "-".join((opening.name, stage.name, *(getattr(each, "name", each) for each in said)))


CELLS = sorted(cells(), key=name)


def test_every_pair_of_the_table_is_walked():
    walked = {(opening, stage, said, answered) for opening, stage, said, answered in CELLS}
    left = {
        (c.opening, c.answering, c.said, c.answered)
        for opening in REQUEST_TABLE
        for c in crossings(opening)
    } - walked
    assert all(
        (opening is M.TRACK_STATUS and stage is Stage.TALKING)
        or (opening is M.PUBLISH and stage is Stage.SILENT and said in ANSWERS_AN_UPDATE)
        for opening, stage, said, _ in left
    )
    assert len(walked) > 200


@pytest.mark.parametrize("asks_is_client", [True, False], ids=["client asks", "server asks"])
@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_two_that_cross_leave_both_ends_at_one(cell, asks_is_client):
    opening, stage, said, answered = cell
    world = World(opening, asks_is_client, stage)
    ours, theirs = world.request, world.theirs
    steps: list[Callable[[], None]] = []
    for kind, requester, speaker, hearer in (
        (said, True, ours, theirs),
        (answered, False, theirs, ours),
    ):
        holds = stage is Stage.TALKING and kind in ANSWERS_AN_UPDATE
        if holds:
            world.hold_an_update(hearer, speaker)

        def step(kind=kind, requester=requester, holds=holds):
            world.held = holds
            if opening is M.TRACK_STATUS and requester and kind is M.GOAWAY:
                with pytest.raises(MisuseError):  # FIN went out with the request
                    world.say(kind, requester=requester, other=stage)
            else:
                world.say(kind, requester=requester, other=stage)

        steps.append(step)
    for step in steps:
        step()
    world.pair.run()

    for session in world.sessions:
        assert session.closed is None, session.closed
    ends = {RESET, FETCHED, M.REQUEST_ERROR, M.PUBLISH_DONE} & {said, answered}
    if opening is M.TRACK_STATUS and answered is M.REQUEST_OK:
        ends.add(answered)
    if opening is M.PUBLISH and stage is Stage.SILENT and answered in (M.GOAWAY, FIN):
        ends.discard(M.PUBLISH_DONE)  # it counts from the moment the offer is taken
    if ends:
        assert {ours.state, theirs.state} == {RequestState.CLOSED}
    elif not {FIN, M.PUBLISH_DONE} & {said, answered}:
        established = stage is Stage.TALKING or answered is not M.GOAWAY
        state = RequestState.ESTABLISHED if established else RequestState.PENDING
        assert {ours.state, theirs.state} == {state}
    whole = said not in (RESET, M.REQUEST_ERROR) and answered not in (RESET, M.REQUEST_ERROR)
    if (FETCHED in ends or (M.PUBLISH_DONE in ends and stage is Stage.TALKING)) and whole:
        assert world.collector.failed is None
        assert world.collector.locations == [*product(range(2), range(3))]
        if M.PUBLISH_DONE in ends:
            assert world.collector.done == PublishDoneCode.TRACK_ENDED
    if not ends:
        ours.cancel()
        theirs.revoke()
        world.pair.run()
    assert [len(answers) for answers in world.heard] == [1] * len(world.heard)
    for session in world.sessions:
        assert_clean(session)
        assert session.remembered().request_id_gaps == 0
        assert session.remembered().updates == 0
