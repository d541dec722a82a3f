"""The table of what both sides may say on a request stream, and what crosses there."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from moqt.requests import REQUEST_TABLE, RequestState, RequestStream, Stage, crossings
from moqt.values.codes import MessageType
from moqt.values.deadlines import Deadlines
from moqt.values.errors import MisuseError, SessionError

OPENINGS = sorted(REQUEST_TABLE)


class Said:
    """A message of which only the type counts."""

    def __init__(self, kind):
        self.TYPE = kind


class End:
    """One end of a request stream: what it sent, and what its owner heard."""

    def __init__(self, opening, *, requester):
        self.sent, self.heard, self.answers = [], [], []
        session = SimpleNamespace(
            clock=Deadlines(),
            send_message=lambda stream_id, message, fin: self.sent.append(message),
            rules=SimpleNamespace(check_goaway=lambda message: None),
        )
        self.stream = RequestStream(session, opening, requester=requester, stream_id=4)
        self.stream.owner = SimpleNamespace(
            message=self.heard.append,
            first_answer=self.answers.append,
            settle_tokens=lambda: None,
        )

    def at(self, ours, theirs):
        self.stream.ours.stage, self.stream.theirs.stage = ours, theirs
        return self


@pytest.mark.parametrize("opening", OPENINGS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("requester", [True, False], ids=["requester", "answering"])
def test_what_the_table_does_not_have_is_refused_when_it_comes_and_when_it_goes(opening, requester):
    ours, theirs = REQUEST_TABLE[opening] if requester else reversed(REQUEST_TABLE[opening])
    for stage, kind in product(Stage, MessageType):
        end = End(opening, requester=requester).at(stage, stage)
        if kind in ours[stage]:
            end.stream.send(Said(kind))
            assert end.stream.ours.stage is ours[stage][kind] and len(end.sent) == 1
        else:
            with pytest.raises(MisuseError):
                end.stream.send(Said(kind))
            assert end.stream.ours.stage is stage and not end.sent
        if requester and stage is Stage.SILENT and kind is opening:
            continue
        if kind in theirs[stage]:
            end.stream.receive(Said(kind))
            assert end.stream.theirs.stage is theirs[stage][kind]
            assert len(end.heard) + len(end.answers) == 1
        else:
            with pytest.raises(SessionError):
                end.stream.receive(Said(kind))
            assert not end.heard and not end.answers


@pytest.mark.parametrize("opening", OPENINGS, ids=lambda kind: kind.name)
def test_messages_that_cross_are_legal_at_both_ends(opening):
    cells = list(crossings(opening))
    assert len(set(cells)) == len(cells) > 0
    for cell in cells:
        asks = End(opening, requester=True).at(cell.requester, cell.answering)
        answers = End(opening, requester=False).at(cell.answering, cell.requester)
        asks.stream.send(Said(cell.said))
        answers.stream.send(Said(cell.answered))
        asks.stream.receive(*answers.sent)
        answers.stream.receive(*asks.sent)
        assert asks.stream.ours.stage is answers.stream.theirs.stage
        assert asks.stream.theirs.stage is answers.stream.ours.stage
        assert asks.stream.state is answers.stream.state


def test_only_the_first_answer_is_one_and_goaway_is_none():
    end = End(MessageType.SUBSCRIBE, requester=True).at(Stage.TALKING, Stage.SILENT)
    assert end.stream.state is RequestState.PENDING
    end.stream.receive(Said(MessageType.GOAWAY))
    assert end.stream.state is RequestState.PENDING
    end.stream.receive(Said(MessageType.SUBSCRIBE_OK))
    assert end.stream.state is RequestState.ESTABLISHED
    end.stream.receive(Said(MessageType.REQUEST_OK))
    assert [each.TYPE for each in end.answers] == [MessageType.SUBSCRIBE_OK]
    assert [each.TYPE for each in end.heard] == [MessageType.GOAWAY, MessageType.REQUEST_OK]


def test_nothing_is_said_after_publish_done_by_who_said_it():
    for opening in (MessageType.SUBSCRIBE, MessageType.PUBLISH):
        publisher = End(opening, requester=opening is MessageType.PUBLISH)
        publisher.at(Stage.TALKING, Stage.TALKING)
        publisher.stream.send(Said(MessageType.PUBLISH_DONE))
        for kind in MessageType:
            with pytest.raises(MisuseError):
                publisher.stream.send(Said(kind))
        publisher.stream.receive(Said(MessageType.REQUEST_UPDATE))
        assert len(publisher.heard) == 1


def test_a_request_that_is_over_stays_so_and_its_owner_hears_nothing_more():
    end = End(MessageType.FETCH, requester=True).at(Stage.TALKING, Stage.TALKING)
    end.stream.end()
    end.stream.receive(Said(MessageType.REQUEST_OK))
    assert end.stream.state is RequestState.CLOSED and end.stream.owner is None
    assert not end.heard and not end.answers
