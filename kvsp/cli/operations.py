"""`kvsp prefetch`, `sessions` and `doctor`: instances and the state of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvsp.cli.common import ExitCode, InputError, print_json
from kvsp.cli.session import (
    Access,
    Compat,
    Index,
    Json,
    Outcome,
    Prompt,
    ScopeKeyFile,
    Timeout,
    Tokens,
    deadline,
    exit_code,
    run,
    with_access,
)
from kvsp.client import (
    Client,
    ClientError,
    NotAuthorizedError,
    NotFoundError,
    RequestRefusedError,
)
from kvsp.names.codes import HASH_OCTETS, NAMESPACE_FRAGMENT, DirectiveState
from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import check_uuid
from kvsp.records.records import DirectiveBlock, PrefetchDirective, PrefetchStatus, ReplicaRecord

_POLL_S: Final = 0.05


@with_access
def prefetch(
    access: Access,
    index: Index,
    instance: Annotated[
        str, typer.Argument(metavar="INSTANCE", help="Base URI of the instance that shall load.")
    ],
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    deadline_ms: Annotated[
        int, typer.Option(metavar="MS", min=1, max=600_000, help="When it stops loading.")
    ] = 5000,
    lease_ms: Annotated[
        int, typer.Option(metavar="MS", min=1, max=600_000, help="Lease at the sources.")
    ] = 10_000,
    timeout: Timeout = 30,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        access.check("INSTANCE", instance)
        prompt = Prompt.load(scope_key_file, compat, tokens, None)
        scope_id, compat_id = prompt.scope.scope_id, prompt.descriptor.compat_id
        async with access.client(index) as client, deadline(timeout):
            found = await client.lookup(
                scope_id, compat_id, prompt.keys, descriptor=prompt.descriptor
            )
            if not found.matched:
                raise Outcome(ExitCode.NOT_FOUND, "no block of this prompt is cached")
            blocks = tuple(
                DirectiveBlock(each.block_key, tuple(map(_source, each.replicas)))
                for each in found.blocks
            )
            directive = PrefetchDirective(
                str(uuid.uuid4()), scope_id, compat_id, blocks, deadline_ms, lease_ms
            )
            await client.prefetch(instance, directive)
            status = await _finished(client, instance, directive.directive)
        text = (
            f"{status.state}: {len(status.loaded)} of {len(blocks)} blocks are loaded at {instance}"
        )
        result = status.to_dict()
        if status.state is not DirectiveState.COMPLETE:
            reasons = sorted({each.reason for each in status.failed})
            raise Outcome(ExitCode.FAILED, text + f" ({', '.join(reasons) or 'deadline'})", result)
        if not json:
            print(text)
        return result

    run(main, json=json)


async def _finished(client: Client, instance: str, directive: str) -> PrefetchStatus:
    while True:
        status = await client.prefetch_status(instance, directive)
        if status.state is not DirectiveState.PENDING:
            return status
        await asyncio.sleep(_POLL_S)


def _source(record: ReplicaRecord) -> str:
    if record.moqt_namespace is None:
        return record.holder
    return f"{record.holder}#{NAMESPACE_FRAGMENT}{record.moqt_namespace}"


@with_access
def sessions(
    access: Access,
    placement: Annotated[
        str, typer.Argument(metavar="PLACEMENT", help="Base URI of the placement controller.")
    ],
    session: Annotated[
        str | None, typer.Argument(metavar="[SESSION]", help="UUID; without it: all instances.")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the session.")] = False,
    timeout: Timeout = 30,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        access.check("PLACEMENT", placement)
        if end and session is None:
            raise InputError("--end: name the session to end")
        name = _uuid(session)
        async with access.client(None) as client, deadline(timeout):
            if name is None:
                answer = await client.instances(placement)
            elif not end:
                answer = await client.session(placement, name)
            elif not await client.end_session(placement, name):
                raise Outcome(ExitCode.NOT_FOUND, f"there is no session {name}")
            else:
                answer = {"session": name, "ended": True}
        if not json:
            print_json(answer)
        return answer

    run(main, json=json)


def _uuid(session: str | None) -> str | None:
    if session is None:
        return None
    try:
        return check_uuid(session)
    except KvspError as error:
        raise InputError(f"SESSION: {error}") from None


# --- doctor --------------------------------------------------------------------------

_Replicas = Sequence[tuple[int, ReplicaRecord]]
"""Replicas at one holder, with the number of their block in the prompt."""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(slots=True)
class _Findings:
    """What the doctor saw: each with `ok`, `warning`, `skipped` or `failed`."""

    items: list[dict[str, str]] = field(default_factory=list)
    worst: ExitCode = ExitCode.DONE

    def add(self, level: str, what: str, text: str) -> None:
        self.items.append({"level": level, "what": what, "text": text})

    def failed(self, what: str, error: ClientError) -> None:
        self.add("failed", what, str(error))
        self.worst = max(self.worst, exit_code(error))


@with_access
def doctor(
    access: Access,
    index: Index,
    scope_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Scope file; to look a prompt up, too.")
    ] = None,
    compat: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compatibility Descriptor, JSON.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON array of token ids; - is stdin.")
    ] = None,
    every_layer: Annotated[
        bool,
        typer.Option(
            "--every-layer", help="Read every layer of every block, not one layer at each holder."
        ),
    ] = False,
    timeout: Timeout = 30,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        prompt = None
        if scope_key_file is not None and compat is not None and tokens is not None:
            prompt = Prompt.load(scope_key_file, compat, tokens, None)
        elif any(each is not None for each in (scope_key_file, compat, tokens)):
            raise InputError("--scope-key-file, --compat and --tokens go together")
        elif every_layer:
            raise InputError("--every-layer: needs --scope-key-file, --compat and --tokens")
        findings = _Findings()
        async with access.client(index) as client, deadline(timeout):
            await _examine_host(client, "index", index, findings)
            if prompt is not None and not findings.worst:
                await _examine_prompt(client, prompt, findings, every_layer)
        if not json:
            for item in findings.items:
                print(f"{item['level']:8} {item['what']}: {item['text']}")
        if findings.worst:
            failures = sum(item["level"] == "failed" for item in findings.items)
            text = f"{_count(failures, 'check')} failed"
            raise Outcome(findings.worst, text, {"checks": findings.items})
        return {"checks": findings.items}

    run(main, json=json)


async def _examine_host(client: Client, role: str, uri: str, findings: _Findings) -> None:
    """Reachable, trusted, of this protocol, in this role, and ready."""
    what = f"{role} {uri}"
    try:
        services = (await client.discover(uri)).services
        if services.get(role) != uri:
            other = services.get(role)
            says = f"its host says it is {other}" if other else f"its host has no {role}"
            findings.add("warning", what, f"{says}; records and requests must use one base URI")
        await _ask_below(client, uri)
        state = await client.ready(uri)
    except ClientError as error:
        findings.failed(what, error)
        return
    status = state.get("status")
    reasons = [str(each) for each in state.get("reasons") or ()]
    level = "ok" if status == "ready" else "warning"
    findings.add(level, what, "; ".join([str(status), *reasons]))


async def _ask_below(client: Client, uri: str) -> None:
    """Raises ClientError unless a service answers below this very URI.

    What a host says of itself is said by the host, whatever the path.
    """
    try:
        await client.get_descriptor(bytes(HASH_OCTETS), source=uri)  # which nobody has
    except NotAuthorizedError:
        return  # what the credential is good for is seen with a prompt
    except NotFoundError as error:
        if error.problem.name is None:
            raise  # no service of this protocol said so


async def _examine_prompt(
    client: Client, prompt: Prompt, findings: _Findings, every_layer: bool
) -> None:
    """The credential, the descriptor, the lookup, and every holder of the matched blocks."""
    scope_id, compat_id = prompt.scope.scope_id, prompt.descriptor.compat_id
    try:
        await client.get_descriptor(compat_id)
        findings.add("ok", "descriptor", "the index has it")
    except NotFoundError:
        findings.add("warning", "descriptor", "the index has none of this ID: nothing is cached")
    except ClientError as error:
        findings.failed("descriptor", error)
    try:
        found = await client.lookup(scope_id, compat_id, prompt.keys, descriptor=prompt.descriptor)
    except ClientError as error:
        findings.failed("lookup", error)
        return
    level = "ok" if found.matched else "warning"
    findings.add(level, "lookup", f"{found.matched} of {len(prompt.keys)} blocks are cached")
    if found.matched < len(prompt.keys):
        await _examine_miss(client, prompt, findings)
    replicas: dict[str, list[tuple[int, ReplicaRecord]]] = {}
    for number, block in enumerate(found.blocks):
        for record in block.replicas:
            replicas.setdefault(record.holder, []).append((number, record))
    for holder, records in replicas.items():
        if any(record.moqt_namespace is not None for _, record in records):
            findings.add("skipped", f"holder {holder}", "served over MOQT; not examined here")
            continue
        await _examine_host(client, "holder", holder, findings)
        if every_layer:
            await _read_all(client, holder, records, prompt.descriptor, findings)
        else:
            await _read_one(client, holder, records, prompt.descriptor, findings)


async def _examine_miss(client: Client, prompt: Prompt, findings: _Findings) -> None:
    try:
        why = await client.explain(prompt.scope.scope_id, prompt.descriptor.compat_id, prompt.keys)
    except RequestRefusedError as error:
        findings.add("warning", "explain", f"the index does not say why it misses: {error}")
        return
    except ClientError as error:
        findings.failed("explain", error)
        return
    findings.add("warning", "explain", f"block {why.matched}: {why.reason}: {why.detail}")


async def _read_one(
    client: Client,
    holder: str,
    records: _Replicas,
    descriptor: Descriptor,
    findings: _Findings,
) -> None:
    """The first layer of the first block at a holder, verified, and what that leaves out."""
    number, record = records[0]
    what = f"block {number} at {holder}"
    first = _parts(record, descriptor)[0].start
    by_layer = record.layer_digests is not None
    layers = range(first, first + 1) if by_layer else range(descriptor.layers)
    try:
        await _read(client, record, layers, descriptor)
    except ClientError as error:
        findings.failed(what, error)
        return
    read = f"layer {first}" if by_layer else "all of it"
    unread = ((descriptor.layers - len(layers), "layer"), (len(records) - 1, "replica"))
    rest = [_count(number, f"other {noun}") for number, noun in unread if number]
    text = f"{read} came and is what the record says"
    if rest:
        text += f"; not read: {' and '.join(rest)} (see --every-layer)"
    findings.add("ok", what, text)


async def _read_all(
    client: Client,
    holder: str,
    records: _Replicas,
    descriptor: Descriptor,
    findings: _Findings,
) -> None:
    """Every layer a holder has of the matched blocks, verified."""
    good = 0
    for number, record in records:
        try:
            for layers in _parts(record, descriptor):
                await _read(client, record, layers, descriptor)
        except ClientError as error:
            findings.failed(f"block {number} at {holder}", error)
        else:
            good += 1
    if good:
        text = f"every layer of {good} of {_count(len(records), 'replica')} came and is what"
        findings.add("ok", f"blocks at {holder}", f"{text} the record says")


def _parts(record: ReplicaRecord, descriptor: Descriptor) -> list[range]:
    """The layers that can be read; a block without digests of them is verified as a whole."""
    whole = [range(descriptor.layers)]
    return whole if record.layer_digests is None else record.held_layers(descriptor.layers)


async def _read(
    client: Client, record: ReplicaRecord, layers: range, descriptor: Descriptor
) -> None:
    arriving = client.get(record, layers=layers, descriptor=descriptor, allow_lossy=True)
    async with contextlib.aclosing(arriving):
        async for _ in arriving:
            pass
