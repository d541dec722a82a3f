"""Cursors over a TrackStore: how Objects get from the store onto streams and datagrams.

`SubscriptionDelivery` serves one established subscription with one `SubgroupDelivery` per
Subgroup and one `DatagramDelivery` per datagram; `FetchDelivery` serves a FETCH or a fill.
A slow peer costs a cursor, never a copy.
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
