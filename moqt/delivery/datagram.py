"""One Object on its way out as a datagram (MOQT "Datagrams")."""

from __future__ import annotations

from moqt.delivery.scheduler import Delivery, Progress
from moqt.delivery.selection import Selection
from moqt.delivery.stream import Served
from moqt.track.stored import StoredObject
from moqt.values.codes import GroupOrder, ObjectStatus
from moqt.wire.objects import DatagramObject


class DatagramDelivery(Delivery):
    """It waits for its turn like any stream, and is sent or dropped when the turn comes."""

    def __init__(
        self,
        subscription: Served,
        selection: Selection,
        stored: StoredObject,
        expires: float | None,
    ) -> None:
        super().__init__(subscription.flow)
        self.subscription = subscription
        self.selection = selection
        self.stored = stored
        self.expires = expires

    def rank(self) -> tuple[int, ...]:
        stored = self.stored
        group = stored.location.group
        ascending = self.selection.group_order is GroupOrder.ASCENDING
        return (stored.priority, 0, group if ascending else -group, 1, stored.location.object)

    def write(self, limit: int) -> Progress:
        subscription, stored = self.subscription, self.stored
        if self.flow.over:
            return Progress.DONE
        counters = subscription.outlet.scheduler.counters
        if self.expires is not None and subscription.outlet.scheduler.now >= self.expires:
            counters.expired_objects += 1
        elif not stored.gone and self.selection.selects_datagram(stored):
            if self._send():
                counters.datagrams_sent += 1
            else:
                counters.datagrams_too_large += 1
        subscription.datagram_done()
        return Progress.DONE

    def _send(self) -> bool:
        subscription, stored = self.subscription, self.stored
        store, location = self.selection.store, stored.location
        store.used(stored)
        normal = stored.status is ObjectStatus.NORMAL
        group = store.groups.get(location.group)
        return subscription.outlet.transport.send_datagram(
            subscription.outlet.codec.encode_datagram(
                DatagramObject(
                    track_alias=subscription.track_alias,
                    group=location.group,
                    object=location.object,
                    priority=stored.priority,
                    properties=stored.properties,
                    end_of_group=normal and group is not None and group.end == location.object + 1,
                    status=stored.status,
                    payload=bytes(stored.payload),
                )
            )
        )
