"""Whether a relay that tells of nothing can tell (KVCS "Discovering Publications").

REQUEST_OK to a SUBSCRIBE_NAMESPACE does not say that the relay knows of all there is: one that has
lost the relay upstream, or waits for its answer, tells of what is here. For a single track it has
to say which it is: TRACK_STATUS is answered with DOES_NOT_EXIST when everybody who may have it was
asked, and else with another code. So one is asked for that nobody has: its namespace is drawn by
lot in our scope and model, and shows nothing of our tokens. Sans-IO over a `moqt` session.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from kvcs.names.codes import ManifestTrack
from kvcs.names.errors import PublisherLost, RetrievalError
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.refusals import NO_STREAM_DELAY, cannot_tell, retry_delay
from kvsp.names.codes import HASH_OCTETS
from moqt.requests import OutgoingTrackStatus, RequestState
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.names import FullTrackName

UNTOLD_SECONDS: Final = 5.0
"""For which a relay is asked again that cannot tell for now."""


def untold(why: str) -> RetrievalError:
    """The failure of a search at a relay that cannot tell, so that nothing is said of what there
    is."""
    return RetrievalError(f"the relay cannot tell what is published: {why}")


class Telling:
    """`poll` at once, whenever `changed` was called, and when the time it returned has come, until
    it is `over`, or `error` is set: untold, or PublisherLost when the session has ended."""

    def __init__(
        self,
        session: Session,
        scope_id: bytes,
        compat_id: bytes,
        *,
        until: float,
        changed: Callable[[], None],
    ) -> None:
        """A relay that cannot tell is asked again `until` then."""
        self.over = False
        self.error: RetrievalError | None = None
        self.why: str | None = None
        """Why the relay cannot tell for now."""
        anchor = secrets.token_bytes(HASH_OCTETS)
        nobodys = PublicationNamespace.create(scope_id, compat_id, anchor)
        self._name = FullTrackName(nobodys.fields, ManifestTrack.MANIFEST.encode())
        self._session = session
        self._until = until
        self._changed = changed
        self._request: OutgoingTrackStatus | None = None
        self._due: float | None = None
        self._delay: float | None = 0.0

    def poll(self, now: float) -> float | None:
        """Do what is due. Returns when to come back at the latest, None for no such time."""
        if self._delay is not None:
            self._due, self._delay = now + self._delay, None
            if self.why is not None and self._due > self._until:
                self.error = untold(self.why)
        if self.over or self.error is not None or self._due is None or now < self._due:
            return None if self.over or self.error is not None else self._due
        self._due = None
        try:
            self._request = self._session.track_status(self._name)
        except SessionClosed as error:
            self.error = PublisherLost(str(error))
        except RequestError as error:
            if error.code != RequestErrorCode.EXCESSIVE_LOAD:
                raise
            self._due = now + NO_STREAM_DELAY
        else:
            self._request.on_answer = self._answered
        return self._due

    def close(self) -> None:
        """Cancel the request; harmless when repeated."""
        if self._request is not None and self._request.state is not RequestState.CLOSED:
            self._request.cancel()
        self.over = True

    def _answered(self, error: MoqtError | None) -> None:
        if self.over:
            return
        again = None if error is None else retry_delay(error)
        if isinstance(error, SessionClosed):
            self.error = PublisherLost(str(error))
        elif error is None or not (cannot_tell(error) or again is not None):
            self.over = True
        elif isinstance(error, RequestError) and error.code == RequestErrorCode.DOES_NOT_EXIST:
            self.over = True  # who was asked says for how long
        elif again is None:
            self.error = untold(str(error))
        else:
            self.why, self._delay = str(error), again
        self._changed()
