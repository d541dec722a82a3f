"""`kvcs-keygen`: make the keys that producers and consumers of a scope share."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from kvcs.trust.producers import Algorithm, ProducerKey, with_producer
from kvsp.cli.plain import PlainCommand, PlainGroup, Version, run_app
from kvsp.names.codes import CipherSuite
from kvsp.names.content_keys import ContentKey
from kvsp.names.errors import DecodeError, FileError, KvspError
from kvsp.names.identity import Scope, parse_hex
from kvsp.names.private_files import changing, replace_private
from kvsp.names.uris import check_holder_uri
from kvsp.principals import (
    EVERY_SCOPE,
    READ,
    RIGHTS,
    ROLES,
    Principal,
    new_token,
    principal_entry,
    principals_with,
    save_token,
)

_ROLES: Final = ", ".join(sorted(ROLES))


class Suite(StrEnum):
    """Cipher suites, as they are typed."""

    AES_128_GCM = "aes-128-gcm"
    AES_256_GCM = "aes-256-gcm"
    AES_128_CTR_HMAC_80 = "aes-128-ctr-hmac-80"
    AES_128_CTR_HMAC_64 = "aes-128-ctr-hmac-64"


_SUITES: Final = {
    Suite.AES_128_GCM: CipherSuite.AES_128_GCM_SHA256_128,
    Suite.AES_256_GCM: CipherSuite.AES_256_GCM_SHA512_128,
    Suite.AES_128_CTR_HMAC_80: CipherSuite.AES_128_CTR_HMAC_SHA256_80,
    Suite.AES_128_CTR_HMAC_64: CipherSuite.AES_128_CTR_HMAC_SHA256_64,
}


class Alg(StrEnum):
    """Signature algorithms, as they are typed."""

    EDDSA = "EdDSA"
    ES256 = "ES256"


_ALGORITHMS: Final = {Alg.EDDSA: Algorithm.EDDSA, Alg.ES256: Algorithm.ES256}

app = typer.Typer(
    cls=PlainGroup,
    name="kvcs-keygen",
    help="Make the keys that the producers and consumers of a scope share.",
    epilog="Example:  kvcs-keygen scope scope.json",
    no_args_is_help=True,
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


@app.callback()
def _program(version: Version = False) -> None:
    """Make the keys that the producers and consumers of a scope share."""


@app.command(cls=PlainCommand, epilog="Example:  kvcs-keygen scope scope.json")
def scope(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The scope file to make.")],
    content_key: Annotated[
        bool,
        typer.Option("--content-key", help="With a key that caches are sealed with, end to end."),
    ] = False,
    cipher_suite: Annotated[
        Suite, typer.Option(help="How they are sealed; the first is for nearly everybody.")
    ] = Suite.AES_128_GCM,
) -> None:
    """Make a scope file with a fresh random scope key.

    Only its owner may read it (mode 0600), and an existing file is never overwritten.
    Prints the Scope ID, which is not a secret. Hand the file itself to every member of
    the scope, and to nobody else. With --content-key relays cannot read what they carry.

    Exit code: 0 done, 1 the file was not made, 2 wrong usage.
    """
    keys = (ContentKey.generate(cipher_suite=_SUITES[cipher_suite]),) if content_key else ()
    fresh = Scope.generate(keys)
    try:
        fresh.save(file)
    except KvspError as error:
        _fail(str(error), 1)
    typer.echo(fresh.scope_id.hex())


@app.command(cls=PlainCommand, epilog="Example:  kvcs-keygen rotate scope.json")
def rotate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The scope file to change.")],
) -> None:
    """Add a fresh content key to a scope file: caches are sealed with it from now on.

    The keys before it stay, for what is sealed with them. The file is exchanged in one step
    and keeps its mode. Prints the Key ID. Hand the new file to those who only read first, to
    publishers last: nobody can open what is sealed with a key that he does not have.

    Exit code: 0 done, 1 the file could not be written and is as it was, 2 wrong usage, or no
    scope file.
    """
    try:
        Scope.load(file, sealing=True)
    except KvspError as error:
        _fail(str(error), 2)
    try:
        fresh = Scope.rotate(file)
    except KvspError as error:
        _fail(str(error), 1)
    typer.echo(fresh.key_id)


@app.command(
    cls=PlainCommand,
    epilog="Example:  kvcs-keygen producer producer.json --producers producers.json",
)
def producer(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The private key file to make.")],
    algorithm: Annotated[Alg, typer.Option("--alg", help="The signature algorithm.")] = Alg.EDDSA,
    kid: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="The key's identifier; made from the key without it."),
    ] = None,
    producers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append its public half there instead of printing it."),
    ] = None,
) -> None:
    """Make the key that a producer signs its manifests with (kvcs-publish --sign-key).

    Only its owner may read the file (mode 0600), and an existing one is never overwritten. Its
    public half is no secret: it is printed, or appended to --producers, the file that
    consumers have (kvcs-subscribe --producers).

    Exit code: 0 done, 1 a file was not made, 2 wrong usage or input files. Nothing is left
    of what was not done.
    """
    if producers is not None and os.path.realpath(producers) == os.path.realpath(file):
        _fail(f"{file}: a private key and the list of public ones go to different files", 2)
    with _alone_with(producers):
        _make_producer(file, algorithm, kid, producers)


def _make_producer(file: Path, algorithm: Alg, kid: str | None, producers: Path | None) -> None:
    try:
        chosen = None if kid is None else parse_hex(kid)
        fresh = ProducerKey.generate(_ALGORITHMS[algorithm], chosen)
        text = b"" if producers is None else with_producer(producers, fresh)
    except (KvspError, ValueError) as error:
        _fail(f"--kid: {error}" if not isinstance(error, FileError) else str(error), 2)
    try:
        fresh.save(file)
        try:
            if producers is None:
                typer.echo(json.dumps(fresh.public))
            else:
                replace_private(producers, text)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
    except FileError as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"its public half cannot be printed: {error.strerror or error}", 1)


@app.command(
    cls=PlainCommand,
    epilog="Example:  kvcs-keygen token token.txt --scope-key-file scope.json "
    "--principals principals.json",
)
def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The token file to make.")],
    scope_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The scope it is good for.")
    ] = None,
    every_scope: Annotated[
        bool, typer.Option("--every-scope", help="Good for every scope, for operators.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A model whose prompts it is good for in the profile kvcache; may be repeated.",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Good for subscribing, not for publishing.")
    ] = False,
    principal: Annotated[
        str, typer.Option(metavar="NAME", help="Who has it, in the relay's records.")
    ] = "",
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE",
            help=f"A role: {_ROLES} (for relays behind relays; placement is a controller's); "
            "may be repeated.",
        ),
    ] = None,
    uri: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URI",
            help="A holder or instance that it speaks for, by base URI; may be repeated.",
        ),
    ] = None,
    principals: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append its record there instead of printing it."),
    ] = None,
) -> None:
    """Make a token file, which programs show to a relay or a KVSP service (--token-file).

    Only its owner may read it (mode 0600), and an existing file is never overwritten. What
    they have to know is no secret: the token's SHA-256 digest and the scope. It is printed,
    or appended to --principals, a file for both kvcs-relay --auth and kvsp-server.

    Exit code: 0 done, 1 a file was not made, 2 wrong usage or input files. Nothing is left
    of what was not done.
    """
    limited = scope_key_file is not None or bool(model)
    if limited is every_scope:
        raise typer.BadParameter(
            "give either --every-scope, or --scope-key-file FILE, --model NAME or both"
        )
    if principals is not None and os.path.realpath(principals) == os.path.realpath(file):
        _fail(f"{file}: a token and its record go to different files", 2)
    _check_names(role or (), uri or ())
    secret = new_token()
    rights = frozenset({READ}) if read_only else RIGHTS
    try:
        scopes = {EVERY_SCOPE: rights} if every_scope else {}
        if scope_key_file is not None:
            scopes[Scope.load(scope_key_file, sealing=True).scope_id.hex()] = rights
        who = Principal(
            name=principal or file.stem,
            roles=frozenset(role or ()),
            uris=frozenset(uri or ()),
            scopes=scopes,
            models=dict.fromkeys(model or (), rights),
        )
        entry = principal_entry(who, [secret])
    except KvspError as error:
        _fail(str(error), 2)
    with _alone_with(principals):
        _save_token(file, secret, principals, entry)


def _save_token(file: Path, secret: str, principals: Path | None, entry: dict[str, Any]) -> None:
    try:
        text = principals_with(principals, entry)
    except KvspError as error:
        _fail(str(error), 2)
    try:
        save_token(file, secret)
        try:
            if principals is None:
                typer.echo(json.dumps(entry))
            else:
                replace_private(principals, text)
        except BaseException:
            # nobody would know it, and a next try would find it in its way
            file.unlink(missing_ok=True)
            raise
    except FileError as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"the record cannot be printed: {error.strerror or error}", 1)


def _check_names(roles: Sequence[str], uris: Sequence[str]) -> None:
    """Exits unless these are roles and URIs that a service can have."""
    for role in roles:
        if role not in ROLES:
            _fail(f"--role: {role!r} is none of {_ROLES}", 2)
    for uri in uris:
        try:
            check_holder_uri(uri)
        except DecodeError as error:
            _fail(f"--uri: {uri!r}: {error.detail}; for example https://h1.example/kvsp/", 2)


@contextlib.contextmanager
def _alone_with(file: Path | None) -> Iterator[None]:
    """Nobody else adds to the file meanwhile, whose record would be lost; exits when others are at
    it for too long."""
    with contextlib.ExitStack() as stack:
        if file is not None:
            try:
                stack.enter_context(changing(file))
            except FileError as error:
                _fail(str(error), 1)
        yield


def _fail(text: str, code: int) -> NoReturn:
    typer.echo(f"kvcs-keygen: {text}", err=True)
    raise typer.Exit(code)


def main() -> NoReturn:
    """Entry point of the `kvcs-keygen` script."""
    run_app(app, "kvcs-keygen")


if __name__ == "__main__":
    main()
