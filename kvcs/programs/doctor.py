"""`kvcs-doctor`: what keeps a cache from being found and retrieved at a relay.

`kvcs-explain` is the same program, asked about the tokens of a prompt: why no prefix of them, or no
longer one, is served, from what the asking client may know.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from cryptography import x509

from kvcs.finding.listing import Found
from kvcs.names.codes import ManifestTrack
from kvcs.names.errors import NotAuthorized, NotFound, PublisherLost, RetrievalError
from kvcs.names.manifest import Manifest
from kvcs.names.manifest_text import ManifestReader, Text
from kvcs.names.namespace import PublicationNamespace, scope_prefix
from kvcs.names.refusals import not_authorized
from kvcs.names.tracks import DataTrack
from kvcs.programs.common import (
    Cafile,
    Congestion,
    QuicBackend,
    TokenFile,
    Url,
    Version,
    check_url,
    exit_code,
    explained,
    inputs,
    readable_descriptor,
    run,
    session_config,
)
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.destinations import MemoryDestination
from kvcs.retrieving.retrieval import Retrieval
from kvcs.retrieving.stats import Stats
from kvcs.trust.cose import read
from kvcs.trust.producers import Producers
from kvcs.trust.sealing import sealed_with
from kvcs.trust.terms import Came, Terms
from kvsp.blocks.kv_files import load_tokens
from kvsp.cli.common import ExitCode, InputError, check_cafile, print_json
from kvsp.cli.plain import PlainCommand, run_app
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, Scope, block_keys
from moqt.aio import MoqtSession
from moqt.client import connect
from moqt.quic.backend import Backend
from moqt.quic.config import QuicConfig
from moqt.quic.congestion.algorithms import Algorithm
from moqt.values.config import SessionConfig
from moqt.values.errors import ConnectError, MoqtError, RequestError
from moqt.values.messages import LocationFilter
from moqt.values.names import Location, TrackNamespace

DOCTOR: Final = "kvcs-doctor"
EXPLAIN: Final = "kvcs-explain"
"""Its other name, by which it has to be given tokens."""
EXAMPLES: Final = (
    "Examples:  kvcs-doctor moqt://localhost:4443 --cafile ca.pem\n\n"
    "           kvcs-doctor moqt://localhost:4443 --cafile ca.pem --scope-key-file scope.json "
    "--compat compat.json --tokens tokens.json"
)
GRACE: Final = 0.3
"""Seconds without another namespace after which a listing counts as whole."""

PATIENCE: Final = 2.0
"""Seconds that a manifest is waited for."""

MOST_ASKED: Final = 8
"""Publications whose manifests are asked for, the longest first."""

SMALL_PACKETS: Final = 1252
"""Octets of UDP payload that every path carries; no more than that costs throughput."""

PROBED: Final = 1.0
"""Seconds after which no answer to larger packets says that they do not pass,"""
LOOKS: Final = 50
"""and how often it is looked in that time."""

WARN_DAYS: Final = 7

app = typer.Typer(name=DOCTOR, add_completion=True, pretty_exceptions_enable=False)


@dataclass(slots=True)
class _Findings:
    """What was seen, each `ok`, `warning` or `failed`; said as it is found."""

    quiet: bool
    items: list[dict[str, Any]] = field(default_factory=list)
    worst: ExitCode = ExitCode.DONE

    def add(self, level: str, what: str, text: str, **more: object) -> None:
        """`more` is told to machines."""
        self.items.append({"level": level, "what": what, "text": text, **more})
        if not self.quiet:
            print(f"{level:8} {what}: {text}", flush=True)

    def failed(self, what: str, text: str, code: ExitCode, **more: object) -> None:
        self.add("failed", what, text, **more)
        self.worst = max(self.worst, code)


@dataclass(frozen=True, slots=True)
class _Prompt:
    scope: Scope
    descriptor: Descriptor
    tokens: int
    keys: Sequence[bytes]
    producers: Producers | None


@dataclass(frozen=True, slots=True)
class _Noting(Terms):
    """Terms that take note of how a manifest came, be it acceptable or not."""

    seen: list[tuple[Came, bytes | None]] = field(default_factory=list)
    """And the key identifier of who has signed it."""

    def unsealed(self, payload: Text, came: Came, namespace: PublicationNamespace) -> Manifest:
        kid = None
        if came.track is ManifestTrack.MANIFEST_COSE and not isinstance(payload, ManifestReader):
            with contextlib.suppress(DecodeError):
                kid = read(payload).kid
        self.seen.append((came, kid))
        return Terms.unsealed(self, payload, came, namespace)

    def told(self, manifest: Manifest | None) -> tuple[list[str], dict[str, Any]]:
        """In which encodings the publication is, who has signed it and with what it is sealed: in
        words, and for machines. What nobody can tell is left out."""
        words: list[str] = []
        more: dict[str, Any] = {}
        if manifest is not None:
            offered = list(dict.fromkeys(entry.offered for entry in manifest.segments))
            words.append(f"in {'; or '.join(offered)}")
            more["encodings"] = offered
        if self.seen:
            came, kid = self.seen[-1]
            signed = came.track is ManifestTrack.MANIFEST_COSE
            who = "somebody who does not say so" if kid is None else kid.hex()
            verified = ", not verified (--producers FILE)" if self.producers is None else ""
            words.append(f"signed by {who}{verified}" if signed else "not signed")
            key_id = sealed_with(came.properties)
            words.append("in clear" if key_id is None else f"sealed with content key {key_id}")
            more |= {"signed": signed, "signed_by": kid and kid.hex(), "content_key": key_id}
        return words, more


@app.command(
    cls=PlainCommand,
    help=(
        "Say what keeps a cache from being found and retrieved: whether the relay can be reached, "
        "its certificate and this machine's clock, the draft, the path's packets, what the token "
        "is good for, what is published of these tokens, in which encodings, by whom signed and "
        "with what sealed, whether it can be read here, whether its first and last Objects are "
        "there, and why a longer prefix is not.\n\n"
        "Exit code: 0 nothing does, 1 the relay or a publisher cannot be reached or Objects are "
        "missing, 2 wrong usage, 3 nothing of these tokens is published, 4 not authorized, 5 a "
        "manifest is not what it should be."
    ),
    epilog=EXAMPLES,
)
def command(
    url: Url,
    scope_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Scope file made by kvcs-keygen.")
    ] = None,
    compat: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compatibility Descriptor, JSON.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON array of token ids; - is standard input."),
    ] = None,
    producers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Producers, one of whom has to have signed a manifest."),
    ] = None,
    cafile: Cafile = None,
    token_file: TokenFile = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long all of it may take.")
    ] = 30,
    congestion: Congestion = Algorithm.BBR,
    quic_backend: QuicBackend = Backend.AUTO,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    version: Version = False,
) -> None:
    """The help is given to the decorator: it holds the exit codes."""
    findings = _Findings(json)

    def main() -> Coroutine[Any, Any, None]:
        check_url(url)
        check_cafile(cafile)
        shown = session_config(token_file)
        prompt = None
        if scope_key_file is not None and compat is not None and tokens is not None:
            with inputs():
                scope = Scope.load(scope_key_file, sealing=True)
                descriptor = readable_descriptor(compat)
                ids = load_tokens(tokens)
                keys = block_keys(scope, descriptor, ids)
                accepted = None if producers is None else Producers.load(producers, pipes=True)
            prompt = _Prompt(scope, descriptor, len(ids), keys, accepted)
        elif _called() == EXPLAIN:
            raise InputError(
                f"give --scope-key-file, --compat and --tokens: {EXPLAIN} says why no prefix of "
                f"these tokens is served, or no longer one ({DOCTOR} looks at a relay alone)"
            )
        elif (scope_key_file, compat, tokens, producers) != (None, None, None, None):
            raise InputError(
                "--scope-key-file, --compat and --tokens go together"
                + ("" if producers is None else ", and --producers with them")
            )
        with inputs():
            quic = QuicConfig(
                cafile=cafile, congestion_control_algorithm=congestion, quic_backend=quic_backend
            )
        return examine(shown, quic, prompt)

    async def examine(shown: SessionConfig, quic: QuicConfig, prompt: _Prompt | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await _examine(url, quic, shown, prompt, findings, token_file)
        except TimeoutError:
            findings.failed("time", f"not done within {timeout:g} s", ExitCode.FAILED)
        if json:
            print_json({"ok": not findings.worst, "checks": findings.items})
        if findings.worst:
            raise typer.Exit(findings.worst)

    run(_called(), main, token_file=token_file)


async def _examine(
    url: str,
    quic: QuicConfig,
    shown: SessionConfig,
    prompt: _Prompt | None,
    findings: _Findings,
    token_file: Path | None,
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        session = await connect(url, quic=quic, session=shown)
    except ConnectError as error:
        findings.failed("relay", explained(error, token_file), exit_code(error))
        return
    try:
        findings.add("ok", "relay", f"{url} answered after {(loop.time() - began) * 1e3:.0f} ms")
        findings.add("ok", "draft", f"{session.session.codec.alpn}")
        _look_at_certificate(session, datetime.now(UTC), findings)
        if prompt is not None:
            await _examine_scope(session, prompt, findings, token_file)
        await _look_at_packets(session, findings)
    finally:
        session.close()
        await session.wait_closed()


def _look_at_certificate(session: MoqtSession, now: datetime, findings: _Findings) -> None:
    cert = session.peer_certificate
    if cert is None:
        findings.add("warning", "certificate", "the relay has shown none")
        return
    left = cert.not_valid_after_utc - now
    level = "ok" if left.days >= WARN_DAYS else "warning"
    names = [str(each.value) for each in _names(cert)]
    findings.add(
        level,
        "certificate",
        f"trusted, for {', '.join(names) or 'no name'}, until "
        f"{cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, {left.days} days from this machine's "
        f"clock, {now:%Y-%m-%d %H:%M} UTC",
    )


def _names(cert: x509.Certificate) -> list[x509.GeneralName]:
    with contextlib.suppress(x509.ExtensionNotFound):
        return list(cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    return []


async def _look_at_packets(session: MoqtSession, findings: _Findings) -> None:
    # the session is there before it is known what the path carries, which is found step by step
    ours = 0
    for _ in range(LOOKS):
        before, (ours, _) = ours, session.packet_sizes
        if before == ours > SMALL_PACKETS:
            break
        await asyncio.sleep(PROBED / LOOKS)
    small = ours <= SMALL_PACKETS
    text = f"the path carries packets of {ours} octets of UDP payload"
    if small:
        text += ": larger ones do not pass, so that large caches take longer (see --mtu)"
    findings.add("warning" if small else "ok", "MTU", text)


# --- what is published -----------------------------------------------------------------


async def _examine_scope(
    session: MoqtSession, prompt: _Prompt, findings: _Findings, token_file: Path | None
) -> None:
    """What the scope has, what of it is for these tokens, and why nothing longer."""
    try:
        listed = await _listed(session, scope_prefix(prompt.scope.scope_id))
    except (RequestError, RetrievalError) as error:
        refused = isinstance(error, RequestError) and not_authorized(error)
        kind: RetrievalError = (NotAuthorized if refused else PublisherLost)(str(error))
        findings.failed("authorization", explained(kind, token_file), exit_code(kind))
        return
    findings.add("ok", "authorization", "the relay lists the publications of the scope")
    same = [each for each in listed if each.compat_id == prompt.descriptor.compat_id]
    others = len({each.compat_id for each in listed} - {prompt.descriptor.compat_id})
    text = f"{_count(len(same), 'publication')} of this scope and descriptor"
    if len(listed) > len(same):
        text += (
            f", and {len(listed) - len(same)} of {_count(others, 'other descriptor')}: where one "
            "of them is meant to be this one, compare the files"
        )
    findings.add("ok" if same else "warning", "published", text)
    places = {key: number for number, key in enumerate(prompt.keys, 1)}
    found = [(places[each.anchor_key], each) for each in same if each.anchor_key in places]
    found.sort(key=lambda each: -each[0])
    whole = 0
    for blocks, namespace in found[:MOST_ASKED]:
        usable = await _ask_manifest(session, prompt, blocks, namespace, findings)
        whole = max(whole, usable)
    _conclude(prompt, found, whole, len(same) - len(found), findings)


def _conclude(
    prompt: _Prompt, found: Sequence[Found], usable: int, elsewhere: int, findings: _Findings
) -> None:
    blocks, rows = len(prompt.keys), prompt.descriptor.block_tokens
    rest = prompt.tokens - blocks * rows
    if not blocks:
        findings.failed(
            "tokens",
            f"{prompt.tokens} tokens fill no block of {rows}: only complete blocks are published",
            exit_code(NotFound()),
        )
        return
    told = f"{usable} of {blocks} blocks ({usable * rows} of {prompt.tokens} tokens) can be had"
    why = []
    if usable < blocks:
        longest = max((each for each, _ in found), default=0)
        if longest > usable:
            why.append(f"what is announced of {longest} blocks cannot be had, see above")
        if longest < blocks:
            why.append(
                f"nothing is announced whose tokens are exactly the first {longest + 1} to "
                f"{blocks} blocks of these"
            )
        if elsewhere:
            why.append(
                f"the other {_count(elsewhere, 'publication')} of this descriptor are of other "
                "tokens, or go on with other tokens: those an index service finds (--kvsp)"
            )
    elif rest:
        why.append(f"the last {_count(rest, 'token')} fill no block of {rows}")
    text = "; ".join([told, *why])
    if not usable and not findings.worst:
        findings.failed("tokens", text, ExitCode.NOT_FOUND)
    else:
        findings.add("ok" if usable == blocks else "warning", "tokens", text)
        if usable:
            findings.worst = ExitCode.DONE  # what cannot be had was only named on the way


async def _ask_manifest(
    session: MoqtSession,
    prompt: _Prompt,
    blocks: int,
    namespace: PublicationNamespace,
    findings: _Findings,
) -> int:
    """Leading blocks of our tokens that a publication has, by its manifest."""
    changed, now = asyncio.Event(), asyncio.get_running_loop().time
    descriptor = prompt.descriptor
    stats, noting = Stats(), _Noting(prompt.scope.content_keys, prompt.producers)
    assembly = Assembly(
        namespace,
        descriptor,
        prompt.keys,
        range(descriptor.layers),
        MemoryDestination(descriptor),
        stats,
        terms=noting,
    )
    retrieval = Retrieval(session.session, assembly, stats, changed=changed.set, hold=True)
    what = f"publication {namespace.publication_id.hex()}"
    retrieval.start()
    until = now() + PATIENCE
    try:
        while assembly.manifest is None and retrieval.error is None and now() < until:
            changed.clear()
            due = retrieval.poll(now())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until if due is None else min(due, until)):
                    await changed.wait()
        error = retrieval.error
        if error is None and assembly.manifest is None:
            error = PublisherLost(
                f"it is announced, and its manifest did not come within {PATIENCE:g} s: its "
                "publisher is lost or cannot be reached from the relay"
            )
        words, more = noting.told(assembly.manifest)
        if error is not None:
            text = "; ".join([f"{blocks} blocks: {error}", *words, "it cannot be read here"])
            findings.failed(what, text, exit_code(error), readable=False, **more)
            return 0
        lacks = await _missing(session, assembly, namespace)
        if lacks:
            text = "; ".join(
                [
                    f"{assembly.blocks} of our blocks by its manifest, but not to be had within "
                    f"{PATIENCE:g} s: {', '.join(lacks)}: its publisher is "
                    "lost or silent, and the relay has not got them",
                    *words,
                ]
            )
            findings.failed(what, text, ExitCode.FAILED, readable=True, missing=lacks, **more)
            return 0
        done = "complete" if assembly.complete else "still in production"
        words = [f"{assembly.blocks} of our blocks, {done}", *words, "it can be read here"]
        findings.add("ok", what, "; ".join(words), readable=True, **more)
        return assembly.blocks
    finally:
        retrieval.close()


async def _missing(
    session: MoqtSession, assembly: Assembly, namespace: PublicationNamespace
) -> list[str]:
    """What does not come of the first and the last Object of each track of the first and the last
    complete segment with blocks of ours: eight at most."""
    manifest = assembly.manifest
    assert manifest is not None
    segments = [
        each for each in manifest.segments if each.complete and each.first_block < assembly.blocks
    ]
    last = assembly.descriptor.layers - 1
    asked = []
    for segment in {each.segment: each for each in (*segments[:1], *segments[-1:])}.values():
        with contextlib.suppress(DecodeError):  # not for us to read: that is told by itself
            for track in manifest.select_tracks(segment.segment, allow_lossy=True):
                ends = dict.fromkeys((Location(0, 0), Location(last, segment.blocks - 1)))
                asked += [(track, at) for at in ends]

    async def comes(track: DataTrack, at: Location) -> bool:
        try:
            async with asyncio.timeout(PATIENCE):
                found = await session.fetch(
                    namespace.fields, track.name, LocationFilter.range(at, at)
                )
                return [each.location async for each in found] == [at]
        except (MoqtError, TimeoutError):
            return False

    came = await asyncio.gather(*(comes(*each) for each in asked))
    return [
        f"{track} layer {at.group} block {at.object}"
        for (track, at), there in zip(asked, came, strict=True)
        if not there
    ]


async def _listed(session: MoqtSession, prefix: TrackNamespace) -> set[PublicationNamespace]:
    """The publications below a prefix. Raises RequestError or PublisherLost."""
    try:
        async with await session.subscribe_namespace(prefix) as listing:
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(GRACE):
                        await anext(listing)
            fields = listing.namespaces
    except RequestError:
        raise
    except MoqtError as error:
        raise PublisherLost(str(error)) from error
    except StopAsyncIteration:
        raise PublisherLost("the relay ended the listing") from None
    found = set()
    for each in fields:
        with contextlib.suppress(DecodeError):  # somebody who does not follow KVCS
            found.add(PublicationNamespace.from_fields(each))
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _called() -> str:
    return EXPLAIN if Path(sys.argv[0]).name == EXPLAIN else DOCTOR


def main() -> NoReturn:
    """Entry point of the `kvcs-doctor` and `kvcs-explain` scripts."""
    run_app(app, _called())


if __name__ == "__main__":
    main()
