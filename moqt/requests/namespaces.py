"""PUBLISH_NAMESPACE and SUBSCRIBE_NAMESPACE, both sides."""

from __future__ import annotations

from collections.abc import Callable

from moqt.requests.host import RequestHost
from moqt.requests.incoming import IncomingRequest
from moqt.requests.outgoing import OutgoingRequest
from moqt.requests.stream import RequestState, RequestStream
from moqt.requests.updates import UpdateAnswer
from moqt.values.codes import (
    MAX_FULL_TRACK_NAME,
    MAX_NAMESPACE_FIELDS,
    MessageType,
    RequestErrorCode,
)
from moqt.values.errors import MoqtError, RequestError, protocol_violation
from moqt.values.messages import (
    Message,
    Namespace,
    NamespaceDone,
    Parameters,
    PublishNamespace,
    RequestOk,
    RequestUpdate,
    SubscribeNamespace,
    SubscribeTracks,
)
from moqt.values.names import TrackNamespace, is_prefix, is_reserved

_OVERLAP = "overlaps a subscription of this kind in this session"


def check_full_name(namespace: TrackNamespace, name: bytes = b"") -> None:
    """Raise SessionError when a prefix and a suffix make a name longer than allowed."""
    if (
        len(namespace) > MAX_NAMESPACE_FIELDS
        or sum(map(len, namespace)) + len(name) > MAX_FULL_TRACK_NAME
    ):
        raise protocol_violation("a namespace longer than allowed, with its prefix")


class OutgoingPublishNamespace(OutgoingRequest):
    """PUBLISH_NAMESPACE; lives until either side cancels."""

    def __init__(
        self,
        session: RequestHost,
        namespace: TrackNamespace,
        parameters: Parameters,
        *,
        on_ended: Callable[[MoqtError], None],
    ) -> None:
        super().__init__(session, PublishNamespace(-1, namespace, parameters))
        self.namespace = namespace
        self._on_ended = on_ended

    def answered(self, message: Message) -> None:
        if isinstance(message, RequestOk):
            self.session.codec.check_request_ok(message, MessageType.PUBLISH_NAMESPACE)
            self.expires(message.parameters)

    def failed(self, error: MoqtError) -> None:
        self._on_ended(error)


class OutgoingSubscribeNamespace(OutgoingRequest):
    """SUBSCRIBE_NAMESPACE; reports full namespaces as they come and go.

    When it ends, every namespace is gone without further word.
    """

    def __init__(
        self,
        session: RequestHost,
        prefix: TrackNamespace,
        parameters: Parameters,
        on_namespace: Callable[[TrackNamespace, bool], None],
        on_ended: Callable[[MoqtError | None], None],
        on_full: Callable[[], None] | None = None,
    ) -> None:
        """`on_full` is told of the first namespace beyond `max_namespaces_told`, and what is told
        goes on without those; by default the request ends there."""
        super().__init__(session, SubscribeNamespace(-1, prefix, parameters))
        self._on_full = on_full
        self._full = False
        self.prefix = prefix
        self.namespaces: set[TrackNamespace] = set()
        self._on_namespace = on_namespace
        self._on_ended = on_ended

    def answered(self, message: Message) -> None:
        match message:
            case RequestOk():
                self.session.codec.check_request_ok(message, MessageType.SUBSCRIBE_NAMESPACE)
                self.expires(message.parameters)
            case Namespace():
                namespace = self.prefix + message.suffix
                limit = self.session.config.max_namespaces_told
                if namespace in self.namespaces:
                    return
                if len(self.namespaces) >= limit:
                    self.session.requests.at_limit("max_namespaces_told", limit)
                    if self._on_full is not None:
                        full, self._full = self._full, True
                        if not full:
                            self._on_full()
                        return
                    raise RequestError(
                        RequestErrorCode.NAMESPACE_TOO_LARGE, f"more than {limit} namespaces"
                    )
                check_full_name(namespace)
                self.namespaces.add(namespace)
                self._on_namespace(namespace, True)
            case NamespaceDone():
                namespace = self.prefix + message.suffix
                if namespace not in self.namespaces:
                    if self._full:
                        return  # one of those that were not kept
                    raise protocol_violation("NAMESPACE_DONE without NAMESPACE")
                self.namespaces.remove(namespace)
                self._on_namespace(namespace, False)

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        prefix = parameters.track_namespace_prefix

        def answered(answer: RequestOk | RequestError) -> None:
            if prefix is not None and isinstance(answer, RequestOk):
                self.prefix = prefix
                for namespace in [n for n in self.namespaces if not is_prefix(prefix, n)]:
                    self.namespaces.remove(namespace)
                    self._on_namespace(namespace, False)
            on_answer(answer)

        super().update(parameters, answered)

    def failed(self, error: MoqtError) -> None:
        self._on_ended(error)

    def peer_finished(self) -> None:
        super().peer_finished()
        if self.state is not RequestState.CLOSED:
            self._close()
            self._on_ended(None)

    def _forget(self) -> None:
        self.namespaces.clear()


class IncomingPublishNamespace(IncomingRequest):
    """PUBLISH_NAMESPACE from a peer."""

    def __init__(
        self, session: RequestHost, message: PublishNamespace, stream: RequestStream | None = None
    ) -> None:
        super().__init__(session, message, stream)
        self._namespace = message.namespace

    @property
    def namespace(self) -> TrackNamespace:
        return self._namespace

    def accept(self, *, expires_ms: int | None = None) -> None:
        """PUBLISH_NAMESPACE_OK: requests for its tracks may be sent to this peer."""
        self._accept_for(expires_ms)


class IncomingPrefixRequest(IncomingRequest):
    """SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS from a peer: what is under a prefix.

    `prefix` is the one asked for now, updates included. Prefixes of one kind in one session
    do not overlap.
    """

    def __init__(
        self,
        session: RequestHost,
        message: SubscribeNamespace | SubscribeTracks,
        stream: RequestStream | None = None,
    ) -> None:
        super().__init__(session, message, stream)
        self.prefix = message.prefix

    @property
    def namespace(self) -> TrackNamespace:
        return self.prefix

    def admit(self) -> bool:
        if not self.session.requests.claim_prefix(self, self.prefix):
            self.reject(RequestErrorCode.PREFIX_OVERLAP, _OVERLAP)
            return False
        return True

    def check_prefix(self, prefix: TrackNamespace) -> None:
        """Raise RequestError when an update may not change the prefix to this one."""
        if is_reserved(prefix):
            raise RequestError(RequestErrorCode.DOES_NOT_EXIST, "the namespace is reserved")
        if not self.session.requests.claim_prefix(self, prefix):
            raise RequestError(RequestErrorCode.PREFIX_OVERLAP, _OVERLAP)
        refused = self.session.handler.check_prefix(self, prefix)
        if refused is not None:
            raise RequestError(refused, "no right to the new prefix")


class IncomingSubscribeNamespace(IncomingPrefixRequest):
    """SUBSCRIBE_NAMESPACE from a peer."""

    def __init__(
        self, session: RequestHost, message: SubscribeNamespace, stream: RequestStream | None = None
    ) -> None:
        super().__init__(session, message, stream)
        self._told: set[TrackNamespace] = set()

    def accept(self, *, expires_ms: int | None = None) -> None:
        """SUBSCRIBE_NAMESPACE_OK; `add` what is there afterwards."""
        self._accept_for(expires_ms)

    def add(self, namespace: TrackNamespace) -> None:
        """NAMESPACE, once per namespace."""
        if (
            self.state is RequestState.ESTABLISHED
            and is_prefix(self.prefix, namespace)
            and namespace not in self._told
        ):
            self._told.add(namespace)
            self.tell(Namespace(namespace[len(self.prefix) :]))

    def remove(self, namespace: TrackNamespace) -> None:
        """NAMESPACE_DONE, when it was told of."""
        if self.state is RequestState.ESTABLISHED and namespace in self._told:
            self._told.remove(namespace)
            self.tell(NamespaceDone(namespace[len(self.prefix) :]))

    def updated(self, update: RequestUpdate) -> None:
        prefix = update.parameters.track_namespace_prefix
        if prefix is not None:
            self.check_prefix(prefix)
            self.prefix = prefix
            self._told = {n for n in self._told if is_prefix(prefix, n)}
        super().updated(update)
        if prefix is not None:
            self.session.handler.namespace_prefix_changed(self)
