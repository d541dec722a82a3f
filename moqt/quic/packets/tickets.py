"""Session tickets (RFC 8446 section 4.6.1): who was here before shakes hands without certificates.

None of them allows early data, which whoever sees it may send again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from aioquic.tls import SessionTicket
from cryptography import x509

MAX_SERVERS = 256
"""Servers of which a process keeps tickets; those it has heard from least lately are forgotten."""
MAX_OF_SERVER = 16
"""Tickets kept of each: as many connections to it can begin at once."""
MAX_TICKET = 4096
"""Octets of a ticket that is kept. A server chooses them, and they go into a ClientHello, of which
aioquic makes no more than 16 KiB."""
LONGEST = timedelta(days=7)
"""How long a ticket is kept, whatever its server says (RFC 8446 section 4.6.1)."""


class GivenTickets:
    """What a server has given out, each good for one handshake.

    Beyond `most` the oldest are forgotten: whose that was shows nothing but a certificate.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def keep(self, ticket: SessionTicket) -> None:
        # what else it has is for early data
        self._tickets[ticket.ticket] = replace(ticket, other_extensions=[])
        while len(self._tickets) > self._most:
            self._tickets.popitem(last=False)

    def take(self, name: bytes) -> SessionTicket | None:
        return self._tickets.pop(name, None)


class Ticket(NamedTuple):
    """What a server has given us, and the certificate it had shown."""

    ticket: SessionTicket
    certificate: x509.Certificate | None


class HeldTickets:
    """What servers have given the clients of this process.

    A ticket stands for a certificate that was judged: it is used where the same server would be
    judged in the same way, and no longer than the certificate is valid.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[Any, list[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def keep(self, judged: Any, ticket: SessionTicket, shown: x509.Certificate | None) -> None:
        """`judged`: by whom, as what and how the server has been."""
        if len(ticket.ticket) > MAX_TICKET:
            return
        until = min(ticket.not_valid_after, ticket.not_valid_before + LONGEST)
        if shown is not None:
            until = min(until, shown.not_valid_after_utc)
        ticket = replace(
            ticket, max_early_data_size=None, other_extensions=[], not_valid_after=until
        )
        held = self._of.setdefault(judged, [])
        self._of.move_to_end(judged)
        held.append(Ticket(ticket, shown))
        del held[:-MAX_OF_SERVER]
        if len(self._of) > MAX_SERVERS:
            self._of.popitem(last=False)

    def take(self, judged: Any) -> Ticket | None:
        """The newest, which nobody has used; None without any that is valid."""
        held = self._of.pop(judged, [])
        found = held.pop() if held else None
        if held:
            self._of[judged] = held
        return found if found is not None and found.ticket.is_valid else None
