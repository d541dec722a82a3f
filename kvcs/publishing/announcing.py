"""Serving what is published on a session, and announcing it."""

from __future__ import annotations

from typing import Protocol

from kvcs.names.tracks import TrackServer
from moqt.aio import MoqtSession, PublishedNamespace
from moqt.values.names import TrackNamespace


class _Named(Protocol):
    @property
    def fields(self) -> TrackNamespace: ...


class Publishable(Protocol):
    """What can be served and announced: a `Publication`, or one of another profile."""

    @property
    def namespace(self) -> _Named: ...

    def serve(self, publisher: TrackServer) -> None:
        """Serve every track by `publisher`, also those to come."""

    def withdraw(self, publisher: TrackServer) -> None:
        """Serve nothing by `publisher` any more; harmless when it does not."""


async def publish(session: MoqtSession, publication: Publishable) -> PublishedNamespace:
    """Serve a publication on a session and announce its whole namespace.

    It stays announced until `unpublish`, or the session ends; on a new session, publish it
    again. Raises moqt RequestError when the peer refuses the namespace, SessionClosed,
    MisuseError when the session has no Publisher; nothing is served then.
    """
    publication.serve(session.publisher)
    try:
        return await session.publish_namespace(publication.namespace.fields)
    except BaseException:
        unpublish(session, publication)
        raise


def unpublish(
    session: MoqtSession, publication: Publishable, announced: PublishedNamespace | None = None
) -> None:
    """Serve the publication to no new request of the session, and let go of its arrays.

    `announced` is what `publish` returned: its namespace is withdrawn.
    """
    if announced is not None:
        announced.withdraw()
    publication.withdraw(session.publisher)
