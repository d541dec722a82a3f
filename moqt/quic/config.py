"""Settings of a QUIC connection and endpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moqt.quic import backend
from moqt.quic.congestion.algorithms import Algorithm

MIN_DATAGRAM_SIZE = 1200
"""RFC 9000 section 14: no path may carry less."""

MAX_DATAGRAM_SIZE = 16383
"""What the two-octet lengths of long headers and STREAM frames can express."""

NO_ANSWER = (
    "nobody may be there, UDP may be blocked, or the path may carry less than the "
    f"{MIN_DATAGRAM_SIZE} octets that QUIC begins with (an MTU of {MIN_DATAGRAM_SIZE + 48})"
)
"""What to look at when a handshake is not completed in time."""

STREAM_WINDOW = 64 << 20
SESSION_WINDOW = 128 << 20

DEFAULT_ALPN = ("moqt-22",)
H3_ALPN = "h3"
"""HTTP/3, under which WebTransport is spoken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuicConfig:
    """One side's settings; sizes in octets, times in seconds.

    A server needs `certfile` and `keyfile`. A client verifies the server against `cafile`
    (or the system's authorities) unless `verify` is false.
    """

    alpn: Sequence[str] = DEFAULT_ALPN
    certfile: str | Path | None = None
    keyfile: str | Path | None = None
    cafile: str | Path | None = None
    verify: bool = True
    server_name: str | None = None
    """The name the certificate must carry; the host connected to when absent."""

    max_datagram_size: int = MAX_DATAGRAM_SIZE
    """The most UDP payload a packet may have, both ways: the peer is told. Each connection begins
    with 1200 and finds out what its path carries, up to this (DPLPMTUD); a path that later carries
    less is noticed. To be set only where the search is not wanted (1200) or is misled."""

    idle_timeout: float = 30.0
    """Seconds without a word after which a connection is given up."""
    keep_alive: float | None = None
    """PING after so long without hearing from the peer; None is a third of the idle time-out
    in effect, 0 sends none (an idle connection then ends by time-out)."""
    handshake_timeout: float = 10.0
    """Seconds a handshake may take."""

    stream_window: int = STREAM_WINDOW
    """Receive credit per stream beyond what the application has consumed, at most: it begins with
    8 MiB, or an eighth of the session's, and goes to four times what comes in a round trip, as far
    as it leaves something to the other streams, those that are paused included."""
    session_window: int = SESSION_WINDOW
    """Receive credit over all streams beyond what the application has consumed, at most: it begins
    with 16 MiB and grows likewise."""
    window_memory: int = 1 << 30
    """Receive credit of all connections of the process together, 256 KiB of each not counted. An
    address has as much as is left at most, a connection a quarter of what its address may have."""
    max_streams_bidi: int = 128
    """Bidirectional streams granted to the peer at first, and at least so many beyond those it
    has opened: as many more as it has open, up to `max_open_streams_bidi`."""
    max_streams_uni: int = 128
    """The same for unidirectional streams."""
    max_open_streams_bidi: int = 32_768
    """Bidirectional streams the peer may have open at a time."""
    max_open_streams_uni: int = 16_384
    """Unidirectional streams the peer may have open at a time."""
    max_datagram_queue: int = 256 << 10
    """Octets of QUIC DATAGRAMs waiting to be sent; more are dropped."""

    webtransport: bool = True
    """A server also takes WebTransport sessions (`https://`) on its port."""
    max_connections: int = 1000
    """Connections a server holds at a time; more are refused with CONNECTION_REFUSED."""
    max_connections_per_address: int = 256
    """Of these, those of one IP address (of one /64 for IPv6)."""
    retry_threshold: int = 64
    """Handshakes under way from which on a server makes new clients prove their address with
    a Retry packet (RFC 9000 section 8.1.2) before it keeps anything for them; 0 for always."""
    reset_key_file: str | Path | None = None
    """Where a server keeps the key of its stateless resets (RFC 9000 section 10.3), made unless it
    is there: clients of one that was restarted with the same key learn so at once. None is a key
    of this process alone: they wait for their idle time-out. Each server needs its own."""
    max_resets: int = 50
    """Stateless resets a server sends in a second to peers whose addresses share one of 64
    buckets; 0 sends none."""
    max_session_tickets: int = 4096
    """Session tickets that a server keeps, about a kilobyte each, for clients that come again and
    shake hands without a certificate. Each is good for one handshake within a day, none for early
    data; beyond, the oldest are forgotten. 0 gives out none, and has a client use none."""
    max_reassembly: int | None = None
    """Octets held over all streams because something before them is missing, 128 more for each
    piece: a connection with more is closed. None is one and a half times the session's window as
    it is, which only a peer that sends crumbs can exceed."""
    max_pieces: int = 65_536
    """Pieces held out of order on one stream: a connection with more on one is closed."""
    socket_buffer: int = 4 << 20
    """SO_RCVBUF and SO_SNDBUF asked for; the kernel may give less."""

    congestion_control_algorithm: str = Algorithm.BBR
    """How much is sent at a time and how fast: `bbr` keeps a model of the path and fills it in
    spite of losses that are not its own, `cubic` and `reno` halve or so at any loss."""
    remember_paths: float = 600.0
    """Seconds for which the process remembers what the path to an address held: the next connection
    there begins with half of it under way (careful resume). 0 remembers nothing; 4,096 addresses
    are remembered at most."""
    first_flight: int = 0
    """Octets that may be under way, paced over a round trip, once the handshake with an address of
    which nothing is remembered is over: for sites whose paths are known to hold so much. As with
    careful resume, losses that chance does not explain make it half of what arrived. 0 begins with
    ten packets, as one must on a network that is not one's own; short paths always do."""
    quic_backend: str = field(default_factory=backend.default)
    """Who protects packets of bulk data and takes their frames apart: `python`, `native` (a C
    extension that the installation builds where it can, for a third of the CPU time), or `auto`,
    which is `native` where that is there. The environment variable KVCS_QUIC_BACKEND is the default
    of all that do not set it."""
    keylog_file: str | Path | None = None
    """TLS secrets are appended here (SSLKEYLOGFILE format): whoever has the file can read the
    traffic. For debugging only; no environment variable sets it."""
    qlog_dir: str | Path | None = None
    """An event log (`moqt.quic.qlog`) per connection goes here. For debugging: it costs most of the
    throughput."""
    qlog_max_octets: int = 256 << 20
    """Where the log of a connection ends; later events are dropped and counted."""

    def prepare_logs(self) -> None:
        """Make `qlog_dir` and `keylog_file`, for their owner only, unless they are there.

        Raises OSError. Connections do it themselves; a program does it to fail early.
        """
        if self.qlog_dir is not None:
            Path(self.qlog_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.keylog_file is not None:
            os.close(os.open(self.keylog_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))

    def __post_init__(self) -> None:
        def check(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(message)

        # A string is a sequence of strings too: `alpn="moqt-22"` would offer seven letters.
        check(
            not isinstance(self.alpn, str)
            and len(self.alpn) > 0
            and all(isinstance(name, str) and 0 < len(name) < 256 for name in self.alpn),
            "alpn must be a non-empty sequence of protocol names of 1 to 255 octets",
        )
        object.__setattr__(self, "alpn", tuple(self.alpn))
        check(
            MIN_DATAGRAM_SIZE <= self.max_datagram_size <= MAX_DATAGRAM_SIZE,
            f"max_datagram_size must be between {MIN_DATAGRAM_SIZE} and {MAX_DATAGRAM_SIZE}",
        )
        check(self.idle_timeout > 0, "idle_timeout must be positive")
        check(self.handshake_timeout > 0, "handshake_timeout must be positive")
        check(
            self.keep_alive is None or self.keep_alive == 0 or self.keep_alive > 0,
            "keep_alive must be None, zero or positive",
        )
        check(self.stream_window >= 1024, "stream_window must be at least 1024")
        check(
            self.session_window >= self.stream_window,
            "session_window must not be smaller than stream_window",
        )
        check(self.session_window < 1 << 60, "session_window must be below 2^60")
        check(self.window_memory >= 0, "window_memory must not be negative")
        for kind in ("streams_bidi", "streams_uni"):
            for name in (f"max_{kind}", f"max_open_{kind}"):
                check(0 <= getattr(self, name) < 1 << 20, f"{name} must be between 0 and 2^20 - 1")
        check(self.max_datagram_queue >= 0, "max_datagram_queue must not be negative")
        check(self.max_connections > 0, "max_connections must be positive")
        check(self.max_connections_per_address > 0, "max_connections_per_address must be positive")
        check(self.retry_threshold >= 0, "retry_threshold must not be negative")
        check(
            self.max_reassembly is None or self.max_reassembly > 0,
            "max_reassembly must be positive",
        )
        check(self.max_resets >= 0, "max_resets must not be negative")
        check(self.max_session_tickets >= 0, "max_session_tickets must not be negative")
        check(self.max_pieces > 0, "max_pieces must be positive")
        check(self.remember_paths >= 0, "remember_paths must not be negative")
        check(0 <= self.first_flight < 1 << 30, "first_flight must be between 0 and 2^30 - 1")
        check(self.qlog_max_octets > 0, "qlog_max_octets must be positive")
        check(self.socket_buffer > 0, "socket_buffer must be positive")
        check(
            self.congestion_control_algorithm in list(Algorithm),
            f"congestion_control_algorithm must be one of {', '.join(Algorithm)}",
        )
        backend.check(self.quic_backend)
        check(
            (self.certfile is None) == (self.keyfile is None),
            "certfile and keyfile come together",
        )
