"""How the states of an instance and of its directives, sessions and Shard Maps move: one table
each, an illegal move is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from kvsp.names.codes import DirectiveState, InstanceState


class LifeEvent(StrEnum):
    """What changes the state of an instance."""

    DRAIN = "drain"
    ACTIVATE = "activate"
    EMPTY = "empty"
    """Draining, and the last session has ended."""


_ACTIVE, _DRAINING = InstanceState.ACTIVE, InstanceState.DRAINING
_SLEEPING = InstanceState.SLEEPING

LIFE_MOVES: Final[Mapping[tuple[InstanceState, LifeEvent], InstanceState]] = {
    (_ACTIVE, LifeEvent.DRAIN): _DRAINING,
    (_ACTIVE, LifeEvent.ACTIVATE): _ACTIVE,
    (_DRAINING, LifeEvent.DRAIN): _DRAINING,
    (_DRAINING, LifeEvent.ACTIVATE): _ACTIVE,
    (_DRAINING, LifeEvent.EMPTY): _SLEEPING,
    (_SLEEPING, LifeEvent.ACTIVATE): _ACTIVE,
}
"""KVSP "Instance Status and Lifecycle". An instance never finds itself failed."""


class DirectiveEvent(StrEnum):
    """How the loading of a directive ends."""

    ALL_LOADED = "all-loaded"
    SOME_LOADED = "some-loaded"
    NONE_LOADED = "none-loaded"


DIRECTIVE_MOVES: Final[Mapping[tuple[DirectiveState, DirectiveEvent], DirectiveState]] = {
    (DirectiveState.PENDING, DirectiveEvent.ALL_LOADED): DirectiveState.COMPLETE,
    (DirectiveState.PENDING, DirectiveEvent.SOME_LOADED): DirectiveState.PARTIAL,
    (DirectiveState.PENDING, DirectiveEvent.NONE_LOADED): DirectiveState.FAILED,
}
"""KVSP "Prefetch Directives". A final state stays."""


class ServingState(StrEnum):
    """Where a session stands at this instance: its cache is loaded or computed, it
    generates, it has all its output, another instance has it, or it cannot go on."""

    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"
    DROPPED = "dropped"
    BROKEN = "broken"


class ServingEvent(StrEnum):
    """What happens to a session at this instance."""

    LOADED = "loaded"
    FINISH = "finish"
    DROP = "drop"
    BREAK = "break"


SERVING_MOVES: Final[Mapping[tuple[ServingState, ServingEvent], ServingState]] = {
    (ServingState.LOADING, ServingEvent.LOADED): ServingState.RUNNING,
    (ServingState.LOADING, ServingEvent.BREAK): ServingState.BROKEN,
    (ServingState.LOADING, ServingEvent.DROP): ServingState.DROPPED,
    (ServingState.LOADING, ServingEvent.FINISH): ServingState.FINISHED,
    (ServingState.RUNNING, ServingEvent.FINISH): ServingState.FINISHED,
    (ServingState.RUNNING, ServingEvent.BREAK): ServingState.BROKEN,
    (ServingState.RUNNING, ServingEvent.DROP): ServingState.DROPPED,
    (ServingState.FINISHED, ServingEvent.DROP): ServingState.DROPPED,
}
"""KVSP "Session Checkpoints and Migration"."""


class MemberState(StrEnum):
    """Where a member stands between two versions of a Shard Map."""

    STABLE = "stable"
    LOADING = "loading"
    PREPARED = "prepared"


class MemberEvent(StrEnum):
    """What happens to a member of a Shard Map."""

    PLAN = "plan"
    LOADED = "loaded"
    FAIL = "fail"
    COMMIT = "commit"
    ABORT = "abort"


MEMBER_MOVES: Final[Mapping[tuple[MemberState, MemberEvent], MemberState]] = {
    (MemberState.STABLE, MemberEvent.PLAN): MemberState.LOADING,
    (MemberState.LOADING, MemberEvent.LOADED): MemberState.PREPARED,
    (MemberState.LOADING, MemberEvent.FAIL): MemberState.STABLE,
    (MemberState.LOADING, MemberEvent.ABORT): MemberState.STABLE,
    (MemberState.PREPARED, MemberEvent.COMMIT): MemberState.STABLE,
    (MemberState.PREPARED, MemberEvent.ABORT): MemberState.STABLE,
}
"""KVSP "Sequence-Sharded Caches and Resharding"."""
