"""How the states of instances, sessions and Shard Maps move at the controller: one table each,
an illegal move is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from kvsp.names.codes import InstanceState


class InstanceEvent(StrEnum):
    """What changes the state the controller wants an instance to have."""

    DRAIN = "drain"
    ACTIVATE = "activate"
    SLEPT = "slept"
    FAIL = "fail"


_ACTIVE, _DRAINING = InstanceState.ACTIVE, InstanceState.DRAINING
_SLEEPING, _FAILED = InstanceState.SLEEPING, InstanceState.FAILED

INSTANCE_MOVES: Final[Mapping[tuple[InstanceState, InstanceEvent], InstanceState]] = {
    (_ACTIVE, InstanceEvent.DRAIN): _DRAINING,
    (_ACTIVE, InstanceEvent.ACTIVATE): _ACTIVE,
    (_ACTIVE, InstanceEvent.FAIL): _FAILED,
    (_DRAINING, InstanceEvent.DRAIN): _DRAINING,
    (_DRAINING, InstanceEvent.ACTIVATE): _ACTIVE,
    (_DRAINING, InstanceEvent.SLEPT): _SLEEPING,
    (_DRAINING, InstanceEvent.FAIL): _FAILED,
    (_SLEEPING, InstanceEvent.SLEPT): _SLEEPING,
    (_SLEEPING, InstanceEvent.ACTIVATE): _ACTIVE,
    (_SLEEPING, InstanceEvent.FAIL): _FAILED,
}
"""KVSP "Instance Status and Lifecycle". Only a higher epoch leads out of failed."""


class SessionState(StrEnum):
    """Where a session stands: its instance serves it, it needs one, one was asked,
    it cannot be continued, or it is over."""

    RUNNING = "running"
    WAITING = "waiting"
    RESUMING = "resuming"
    LOST = "lost"
    FINISHED = "finished"


class SessionEvent(StrEnum):
    """What happens to a session."""

    CHECKPOINT = "checkpoint"
    FENCE = "fence"
    SEND = "send"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    GIVE_UP = "give-up"
    END = "end"


SESSION_MOVES: Final[Mapping[tuple[SessionState, SessionEvent], SessionState]] = {
    (SessionState.RUNNING, SessionEvent.CHECKPOINT): SessionState.RUNNING,
    (SessionState.RUNNING, SessionEvent.FENCE): SessionState.WAITING,
    (SessionState.WAITING, SessionEvent.SEND): SessionState.RESUMING,
    (SessionState.WAITING, SessionEvent.GIVE_UP): SessionState.LOST,
    (SessionState.RESUMING, SessionEvent.ACCEPTED): SessionState.RUNNING,
    # the first checkpoint under the new epoch can come before the answer to the resume
    (SessionState.RESUMING, SessionEvent.CHECKPOINT): SessionState.RUNNING,
    (SessionState.RESUMING, SessionEvent.REFUSED): SessionState.WAITING,
    (SessionState.RESUMING, SessionEvent.FENCE): SessionState.WAITING,
    (SessionState.RUNNING, SessionEvent.END): SessionState.FINISHED,
    (SessionState.WAITING, SessionEvent.END): SessionState.FINISHED,
    (SessionState.RESUMING, SessionEvent.END): SessionState.FINISHED,
    (SessionState.LOST, SessionEvent.END): SessionState.FINISHED,
}
"""KVSP "Session Checkpoints and Migration"."""


class MapState(StrEnum):
    """Where a Shard Map stands on the way to its next version."""

    STABLE = "stable"
    PREPARING = "preparing"
    COMMITTING = "committing"
    ABORTING = "aborting"


class MapEvent(StrEnum):
    """What happens to a Shard Map."""

    PLAN = "plan"
    ALL_PREPARED = "all-prepared"
    FAIL = "fail"
    ALL_TOLD = "all-told"


MAP_MOVES: Final[Mapping[tuple[MapState, MapEvent], MapState]] = {
    (MapState.STABLE, MapEvent.PLAN): MapState.PREPARING,
    (MapState.PREPARING, MapEvent.ALL_PREPARED): MapState.COMMITTING,
    (MapState.PREPARING, MapEvent.FAIL): MapState.ABORTING,
    (MapState.COMMITTING, MapEvent.ALL_TOLD): MapState.STABLE,
    (MapState.ABORTING, MapEvent.ALL_TOLD): MapState.STABLE,
}
"""KVSP "Sequence-Sharded Caches and Resharding". A commit is never taken back."""
