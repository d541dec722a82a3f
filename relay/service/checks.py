"""What a relay needs is looked at before it starts; a fault ends the program with one sentence."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from moqt.private_files import PrivateFileError, read_private
from moqt.quic.certificates import check_key_pair
from moqt.quic.config import QuicConfig
from moqt.quic.packets.reset import load_key
from moqt.token_file import TokenFileError, bearer, read_token_file
from moqt.uri import parse_uri
from moqt.values.config import SessionConfig
from moqt.values.errors import MoqtError
from relay.config import Clock, RelayConfig
from relay.disk.files import Folder, InUse
from relay.disk.threads import Threads
from relay.disk.tier import DiskTier
from relay.mesh.directory_client import DIRECTORY_SCHEMES, Mesh
from relay.mesh.uplink_client import Upstream

PROGRAM = "kvcs-relay"

_SECRET_OCTETS = 4096


class Usage(Exception):
    """The settings cannot be meant; the message is the sentence to show."""


class Failure(Exception):
    """The relay cannot run; the message is the sentence to show."""


def check_pair(cert: Path, key: Path) -> None:
    _check_no_pipe(cert, "--cert")
    _check_no_pipe(key, "--key")
    try:
        check_key_pair(cert, key)
        read_private(key, 1)  # who can read it can be this relay
    except OSError as error:
        raise Usage(f"cannot read {error.filename}: {error.strerror or error}") from None
    except (ValueError, PrivateFileError) as error:
        raise Usage(str(error)) from None


def check_makeable(folder: Path | None, option: str) -> None:
    """See that a folder is there or can be made, and can be written to, without making it."""
    if folder is None:
        return
    place = folder
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir():
        raise Usage(f"{option}: {place} is no folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise Usage(f"{option}: {place} cannot be written to")


def upstreams_of(
    urls: Sequence[str],
    here: tuple[str, int],
    *,
    cafile: Path | None,
    token_file: Path | None,
    announce: bool,
    quic: QuicConfig,
    session: SessionConfig,
) -> tuple[Upstream, ...]:
    """The upstream relays, in their order; `here` is what is listened on. Raises Usage."""
    if not urls and (cafile is not None or token_file is not None or announce):
        raise Usage("give --upstream URL with the other options of the upstream relays")
    above, with_tokens = _dialled("upstream", cafile, token_file, quic, session)
    try:
        places = [(uri.host, uri.port, uri.path.partition("?")[0]) for uri in map(parse_uri, urls)]
    except MoqtError as error:
        raise Usage(f"--upstream: {error}") from None
    if any(place[:2] == here for place in places):
        # not by another name for it: that the relays notice themselves
        raise Usage("--upstream is this relay itself: it would ask itself for what it has not")
    for place in places:
        if places.count(place) > 1:
            raise Usage(f"--upstream: {urls[places.index(place)]} is given twice")
    return tuple(
        Upstream(url=url, quic=above, session=with_tokens, announce=announce) for url in urls
    )


def mesh_of(
    url: str | None,
    host: str,
    *,
    reached_as: str | None,
    password_file: Path | None,
    directory_cafile: Path | None,
    cafile: Path | None,
    token_file: Path | None,
    quic: QuicConfig,
    session: SessionConfig,
) -> Mesh | None:
    """The directory and how its relays are dialled; `host` is listened on. Raises Usage."""
    others = (reached_as, password_file, directory_cafile, cafile, token_file)
    if url is None:
        if any(each is not None for each in others):
            raise Usage("give --directory URL with the other options of the mesh")
        return None
    _check_directory(url)
    if directory_cafile is not None and not url.startswith("rediss"):
        raise Usage("--directory-cafile is for a server that is dialled by rediss://")
    _check_readable(directory_cafile, "--directory-cafile")
    dialled, with_tokens = _dialled("mesh", cafile, token_file, quic, session)
    return Mesh(
        url=url,
        password=None if password_file is None else _password_in(password_file),
        reached_as=_reached_as(reached_as, host),
        quic=dialled,
        session=with_tokens,
        cafile=directory_cafile,
    )


def _dialled(
    kind: str,
    cafile: Path | None,
    token_file: Path | None,
    quic: QuicConfig,
    session: SessionConfig,
) -> tuple[QuicConfig, SessionConfig]:
    """How relays of a `kind`, which begins the names of its options, are dialled by one that serves
    with `quic` and `session`. Raises Usage."""
    _check_readable(cafile, f"--{kind}-cafile")
    try:
        tokens = () if token_file is None else (bearer(read_token_file(token_file)),)
    except TokenFileError as error:
        raise Usage(f"--{kind}-token-file: {error}") from None
    dialled = replace(quic, cafile=cafile, qlog_dir=None, keylog_file=None)
    return dialled, replace(session, setup_tokens=tokens)


def _check_readable(path: Path | None, option: str) -> None:
    if path is None:
        return
    _check_no_pipe(path, option)
    try:
        path.read_bytes()
    except OSError as error:
        raise Usage(f"{option}: {path}: {error.strerror or error}") from None


def _check_no_pipe(path: Path, option: str) -> None:
    if path.is_fifo():
        raise Usage(f"{option}: {path}: a pipe, but it is read more than once: name a file")


def _password_in(path: Path) -> str:
    try:
        return read_private(path, _SECRET_OCTETS).rstrip(b"\r\n").decode()
    except OSError as error:
        raise Usage(f"--directory-password-file: {path}: {error.strerror or error}") from None
    except (PrivateFileError, UnicodeDecodeError) as error:
        raise Usage(f"--directory-password-file: {error}") from None


def _check_directory(url: str) -> None:
    if importlib.util.find_spec("redis") is None:
        raise Usage("--directory needs a library: pip install kvcs[directory]")
    try:
        parts = urlsplit(url)
        _ = parts.port
        names = parse_qs(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise Usage(f"--directory: {error}") from None
    if parts.scheme not in DIRECTORY_SCHEMES:
        schemes = ", ".join(f"{each}://" for each in DIRECTORY_SCHEMES)
        raise Usage(f"--directory must begin with one of {schemes}")
    if parts.password is not None or "password" in names:
        # whoever lists the processes would read it
        raise Usage("--directory: the password belongs in the file of --directory-password-file")
    if parts.scheme != "unix" and not parts.hostname:
        raise Usage("--directory names no host")
    # a library that only this needs
    from relay.mesh.directory_store import check_server

    try:
        check_server(url)
    except ValueError as error:
        raise Usage(f"--directory: {error}") from None


def _reached_as(url: str | None, host: str) -> str | None:
    """Where other relays reach this one; None: at `host`, where it listens. Raises Usage for what
    cannot be right."""
    if url is None:
        if is_wildcard(host):
            raise Usage(
                "--directory: say with --reached-as moqt://HOST:PORT where other relays reach this "
                f"one, which listens on every address ({host})"
            )
        return None
    try:
        uri = parse_uri(url)
    except MoqtError as error:
        raise Usage(f"--reached-as: {error}") from None
    if uri.path not in ("", "/") or uri.fragment:
        raise Usage("--reached-as has no path: relays of a mesh share all paths")
    if is_wildcard(uri.host):
        raise Usage(f"--reached-as: {uri.host} is every address, which nobody can dial")
    if _is_loopback(uri.host) and not _is_loopback(host):
        raise Usage(
            f"--reached-as: {uri.host} is reached from this machine alone, and --listen is not"
        )
    return url


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reset_key(path: Path) -> None:
    try:
        load_key(path)
    except OSError as error:
        raise Usage(f"--reset-key: {path}: {error.strerror or error}") from None
    except (ValueError, MoqtError) as error:
        raise Usage(f"--reset-key: {error}") from None


def cannot_listen(wanted: str, error: OSError) -> Failure:
    return Failure(f"cannot listen on {wanted}: {error.strerror or error}")


def check_free(wanted: str, host: str, port: int, kind: socket.SocketKind) -> None:
    """Raises Failure when no socket can be bound there."""
    failure: OSError | None = None
    try:
        places = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
        for family, *_, address in places:
            try:
                with socket.socket(family, kind) as probe:
                    if kind is socket.SOCK_STREAM:  # as the server of the metrics does
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                return
            except OSError as error:
                failure = failure or error
    except UnicodeError:
        raise Failure(f"cannot listen on {wanted}: no host can have that name") from None
    except OSError as error:
        failure = error
    if failure is not None:
        raise cannot_listen(wanted, failure) from None


def disk_in(folder: Path, config: RelayConfig, clock: Clock) -> DiskTier:
    """The disk tier in `folder`, which this process has from now on. Raises Failure."""
    try:
        return DiskTier(Folder(folder), Threads(), config, clock, time.time)
    except InUse as error:
        raise Failure(f"--cache-dir: {error}") from None
    except FileExistsError:
        raise Failure(f"--cache-dir: {folder} is no folder") from None
    except OSError as error:
        raise Failure(f"--cache-dir: {folder}: {error.strerror or error}") from None
