"""Cursors over a TrackStore: how Objects get from the store onto streams and datagrams.

`SubscriptionDelivery` serves one established subscription with one `SubgroupDelivery` per
Subgroup and one `DatagramDelivery` per datagram, as its `Selection` says; `FetchDelivery` serves
a FETCH or a fill. A slow peer costs a cursor, never a copy. `Scheduler` says which goes next.

May import `moqt.track`, `moqt.wire`, `moqt.values` and `moqt.quic.transport`; never requests or
sessions, which it sees as `Outlet`.
"""

from moqt.delivery.fetch import FetchDelivery
from moqt.delivery.padding import PaddingDelivery
from moqt.delivery.selection import Selection
from moqt.delivery.stream import Outlet, StreamDelivery
from moqt.delivery.subscription import SubscriptionDelivery
from moqt.delivery.timeouts import Timeouts

__all__ = [
    "FetchDelivery",
    "Outlet",
    "PaddingDelivery",
    "Selection",
    "StreamDelivery",
    "SubscriptionDelivery",
    "Timeouts",
]
