"""What can be found out about settings without starting: their files, and that they fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvsp.http.app import is_loopback
from kvsp.http.auth import Authenticator, LoopbackOnly, PrincipalsFile
from kvsp.http.server import ServerSettings, check_open, tls_context
from kvsp.names.identity import Scope
from kvsp.names.private_files import read_private
from kvsp.principals import load_token
from kvsp.service.schema import settings as every_setting
from kvsp.service.settings import ROLES, Settings, SettingsError

logger = logging.getLogger("kvsp.server")

_MADE: Final = frozenset({"data_dir"})
"""Folders that are made when they are not there."""

_EXTRAS: Final = {"redis": "redis", "s3": "obstore", "torch": "torch"}
"""The module that each extra brings."""

_SECRET_OCTETS: Final = 4096


def address_of(settings: Settings) -> tuple[str, int]:
    """Host and port of `listen.address`. Raises SettingsError."""
    text = settings.listen.address
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise SettingsError(f"{text!r} is not HOST:PORT; for example 127.0.0.1:8080")
    if settings.dev and not is_loopback(host):
        raise SettingsError(f"--dev listens on this machine only, not on {host}")
    return host, int(port)


def listening(settings: Settings, host: str, port: int) -> ServerSettings:
    """How the server listens there."""
    listen = settings.listen
    return ServerSettings(
        host=host,
        port=port,
        certificate=listen.certificate,
        key=listen.key,
        client_ca=listen.client_ca,
        insecure=listen.insecure,
        drain_s=listen.drain_s,
        idle_s=listen.idle_s,
    )


def authenticator_of(settings: Settings) -> Authenticator:
    """Who finds the principal of a request. Raises PrincipalsFileError."""
    path = settings.listen.principals
    if path is not None:
        return PrincipalsFile(path)
    if not settings.dev:
        logger.warning(
            "no principals file is given: every client on this machine may do everything, "
            "with no credential, and no other client anything; set principals under [listen]"
        )
    return LoopbackOnly()


def secret_in(path: Path) -> str:
    """A password on one line of a file that only its owner may read. Raises FileError."""
    return read_private(path, _SECRET_OCTETS).decode("utf-8", "replace").strip()


def _needs_extra(extra: str, what: str) -> None:
    """Raises SettingsError when an extra that a setting needs is not installed."""
    module = _EXTRAS[extra]
    if find_spec(module) is None:
        raise SettingsError(f"{what} is not installed ({module}): pip install kvcs[{extra}]")


def check_files(settings: Settings) -> None:
    """Raises SettingsError that names the setting of a file that is not there or not to be
    read, and the extra that is missing."""
    for name, path in _files(settings):
        try:
            path.stat()
        except OSError as error:
            raise SettingsError(f"{name}: {path}: {error.strerror or error}") from None
        if not os.access(path, os.R_OK):
            raise SettingsError(f"{name}: {path}: Permission denied")
    if "holder" in settings.roles and settings.holder.objects.url is not None:
        _needs_extra("s3", "the object tier")
    if "index" in settings.roles and settings.index.redis.url is not None:
        _needs_extra("redis", "the client of Valkey and Redis")
    if "controller" in settings.roles and settings.controller.redis.url is not None:
        _needs_extra("redis", "the client of Valkey and Redis")
    if "instance" in settings.roles and settings.instance.engine == "torch":
        _needs_extra("torch", "the engine torch")


def _files(settings: Settings) -> Iterator[tuple[str, Path]]:
    """The files that the roles of this server need, by the names of their settings."""
    for name, setting in every_setting().items():
        table = name.partition(".")[0]
        other_role = table in ROLES and table not in settings.roles
        if not setting.is_path or name in _MADE or other_role:
            continue
        value = setting.of(settings)
        for path in value if setting.is_list else (value,):
            if path is not None:
                yield name, path


def check_start(settings: Settings) -> None:
    """Everything that a start finds out before it takes a port or writes a file.

    Raises SettingsError, and what the readers of the files raise: KvspError of some kind,
    with the name of the file.
    """
    host, port = address_of(settings)
    check_files(settings)
    server = listening(settings, host, port)
    check_open(authenticator_of(settings), server)
    tls_context(server)
    if settings.peers.token_file is not None:
        load_token(settings.peers.token_file)
    if "instance" in settings.roles:
        for path in settings.instance.scopes:
            Scope.load(path, sealing=True)
