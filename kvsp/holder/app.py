"""The holder over HTTP (KVSP "Leases", "Block Retrieval and Storage")."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry
from starlette.responses import Response

from kvsp.blocks.container import (
    layers_parameter,
    parse_codec,
    parse_layers,
    parse_repr_digest,
    repr_digest_field,
)
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.holder import (
    BusyError,
    CodecUnavailableError,
    Holder,
    Records,
)
from kvsp.holder.leases.journal import LeaseJournalError
from kvsp.holder.leases.table import Lease, LeaseQuotaError
from kvsp.holder.metrics import HolderMetrics
from kvsp.holder.parts import LeasedError
from kvsp.holder.reading import Body
from kvsp.holder.records.index import DescriptorSource, IndexRefusedError, IndexUnavailableError
from kvsp.holder.records.index_client import HttpIndexClient
from kvsp.holder.response import BlockResponse
from kvsp.holder.rooms import ClientBusyError, NoRoomError
from kvsp.holder.store import BlockExistsError, MissError, MissReason
from kvsp.holder.tiers.tiers import TierFullError, TierUnavailableError
from kvsp.holder.upload import ContainerTooLargeError
from kvsp.http.call import Call, json_response, no_content, too_large
from kvsp.http.openapi import hex_schema
from kvsp.http.service import Health, Operation, Service
from kvsp.names.codes import (
    BLOCK_MEDIA_TYPE,
    HASH_OCTETS,
    JSON_MEDIA_TYPE,
    PRIOR_FIELD,
    Codec,
    DecodeErrorName,
)
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import (
    BlockId,
    block_path,
    check_uuid,
    lease_path,
    parse_block_id,
    parse_compat_id,
)
from kvsp.principals import READ, WRITE, Right
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import LeaseGrant, LeaseRequest, StoredBlock, TtlAnswer

logger = logging.getLogger("kvsp.holder")

_FULL_RETRY_S: Final = 30.0
_BUSY_RETRY_S: Final = 1.0
_BLOCK_PATH: Final = "blocks/{compat}/{scope}/{block_key}"
_DOUBT_PATH: Final = _BLOCK_PATH + "/verification"
_LEASE_PATH: Final = "leases/{lease}"


class HolderRecords(Records, Protocol):
    """Who tells the index, with the life of a service."""

    @property
    def unavailable(self) -> bool:
        """Whether the index did not answer last time."""
        ...

    @property
    def behind(self) -> str:
        """In words, that records are published too slowly; empty when not."""
        ...

    def describe(self, descriptors: DescriptorSource) -> None:
        """Where descriptors come from, for an index that lost them."""
        ...

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


class HolderService(Service):
    """The role `holder`."""

    role = "holder"

    def __init__(
        self,
        holder: Holder,
        records: HolderRecords,
        descriptors: Descriptors,
        index: HttpIndexClient | None = None,
    ) -> None:
        """`records` is what the holder was made with; `index` is closed with the service."""
        self.holder = holder
        self._records = records
        self._descriptors = descriptors
        self._index = index
        records.describe(descriptors.get)

    def operations(self) -> Sequence[Operation]:
        block: dict[str, Any] = {
            "path": _BLOCK_PATH,
            "path_parameters": {
                "compat": hex_schema(32),
                "scope": hex_schema(16),
                "block_key": hex_schema(32),
            },
        }
        reading: dict[str, Any] = {
            **block,
            "handler": self._get,
            "success": (200, 304),
            "streaming": True,
            "query_parameters": {
                "layers": {"type": "string", "pattern": "^(0|[1-9][0-9]*)-(0|[1-9][0-9]*)$"},
                "codec": {"type": "integer", "minimum": 0, "maximum": 65535},
            },
            "request_headers": {"If-None-Match": {"type": "string"}},
            "problems": (ProblemName.LAYERS_UNAVAILABLE, ProblemName.CODEC_UNSUPPORTED),
        }
        lease: dict[str, Any] = {
            "path": _LEASE_PATH,
            "path_parameters": {"lease": {"type": "string", "format": "uuid"}},
            "problems": (ProblemName.UNKNOWN_RESOURCE, ProblemName.LEASE_QUOTA),
        }
        return (
            Operation(
                method="GET",
                summary="The container of a block, or of some of its layers",
                response={"type": "string", "format": "binary"},
                response_media_type=BLOCK_MEDIA_TYPE,
                **reading,
            ),
            Operation(
                method="HEAD",
                summary="What GET would answer, without the body",
                **(reading | {"streaming": False}),
            ),
            Operation(
                method="PUT",
                handler=self._put,
                summary="Store a whole block",
                success=(201,),
                streaming=True,
                request={"type": "string", "format": "binary"},
                request_media_type=BLOCK_MEDIA_TYPE,
                request_headers={
                    "If-None-Match": {"type": "string", "const": "*"},
                    "Repr-Digest": {"type": "string"},
                    PRIOR_FIELD: hex_schema(32),
                },
                response=StoredBlock,
                problems=(
                    ProblemName.COMPAT_UNKNOWN,
                    ProblemName.BLOCK_EXISTS,
                    ProblemName.PRECONDITION_REQUIRED,
                    ProblemName.INVALID_CONTAINER,
                    ProblemName.STORAGE_FULL,
                ),
                **block,
            ),
            Operation(
                method="DELETE",
                handler=self._delete,
                summary="Withdraw and evict a block",
                success=(204,),
                problems=(ProblemName.UNKNOWN_RESOURCE, ProblemName.LEASED),
                **block,
            ),
            Operation(
                method="POST",
                handler=self._verify,
                summary="Read a block's copies again: an answer failed verification",
                success=(204,),
                problems=(ProblemName.UNKNOWN_RESOURCE,),
                **(block | {"path": _DOUBT_PATH}),
            ),
            Operation(
                method="POST",
                path="leases",
                handler=self._acquire,
                summary="Lease blocks",
                success=(201,),
                request=LeaseRequest,
                response=LeaseGrant,
                problems=(ProblemName.UNKNOWN_RESOURCE, ProblemName.LEASE_QUOTA),
            ),
            Operation(
                method="PUT",
                handler=self._renew,
                summary="Start the time of a lease again",
                request=TtlAnswer,
                response=LeaseGrant,
                **lease,
            ),
            Operation(
                method="GET",
                handler=self._show_lease,
                summary="A lease and the time it has left",
                response=LeaseGrant,
                **lease,
            ),
            Operation(
                method="DELETE",
                handler=self._release,
                summary="Release a lease",
                success=(204,),
                **lease,
            ),
            Operation(
                method="GET",
                path="compat/{compat}",
                handler=self._show_descriptor,
                summary="A Compatibility Descriptor",
                shared=True,
                path_parameters={"compat": hex_schema(32)},
                response={"type": "object"},
                problems=(ProblemName.UNKNOWN_RESOURCE,),
            ),
        )

    def register(self, registry: CollectorRegistry) -> None:
        registry.register(HolderMetrics(self.holder, self._records))

    def health(self) -> Health:
        degraded = [f"{each.tier} does not work" for each in self.holder.shared if each.unavailable]
        index = "the index service does not answer" if self._records.unavailable else ""
        return Health(True, (*degraded, *filter(None, [index or self._records.behind])))

    def describe(self) -> Mapping[str, Any]:
        return {"codecs": [int(codec) for codec in Codec]}

    async def start(self) -> None:
        await self.holder.start()
        await self._records.start()

    async def drain(self) -> None:
        await self._records.drain()

    async def stop(self) -> None:
        await self._records.stop()
        await self.holder.close()
        if self._index is not None:
            await self._index.close()

    # --- blocks ----------------------------------------------------------------------

    async def _get(self, call: Call) -> Response:
        block = self._authorized(call, READ)
        layers, codec = _selection(call)
        body = await self._open(call, block, layers, codec)
        headers = self._representation(block, body)
        if _matches(call.headers.get("if-none-match"), headers["ETag"]):
            body.close()
            del headers["Content-Length"]
            return Response(status_code=304, headers=headers)
        if call.method == "HEAD":
            body.close()
            return Response(headers=headers, media_type=BLOCK_MEDIA_TYPE)
        return BlockResponse(self.holder, block, body, headers)

    async def _open(
        self, call: Call, block: BlockId, layers: range | None, codec: int | None
    ) -> Body:
        try:
            return await self.holder.open(
                block,
                layers,
                codec,
                self._descriptor,
                client=call.principal.name,
                head=call.method == "HEAD",
            )
        except MissError as error:
            raise _miss(error, layers) from None
        except CodecUnavailableError as error:
            raise Problem(
                ProblemName.CODEC_UNSUPPORTED,
                "the block is not served in this codec",
                codecs=list(error.codecs),
            ) from None
        except DecodeError as error:
            raise Problem(
                ProblemName.CODEC_UNSUPPORTED,
                f"the block has no form in this codec ({error.detail})",
                codecs=[],
            ) from None
        except ClientBusyError as error:
            raise _wait(error) from error
        except (TierUnavailableError, BusyError) as error:
            raise _not_now(error) from error

    def _representation(self, block: BlockId, body: Body) -> dict[str, str]:
        remaining = int(self._records.remaining_s(block))
        return {
            "Content-Length": str(body.header.total_octets),
            "Repr-Digest": repr_digest_field(body.digest),
            "ETag": f'"{body.digest.hex()}"',
            "Cache-Control": f"private, immutable, no-transform, max-age={remaining}",
            "Accept-Ranges": "none",
        }

    async def _put(self, call: Call) -> Response:
        block = self._authorized(call, WRITE)
        if call.headers.get("if-none-match", "").strip() != "*":
            raise Problem(
                ProblemName.PRECONDITION_REQUIRED,
                "a block is stored with If-None-Match: *, so that none is replaced",
            )
        call.require_media_type(BLOCK_MEDIA_TYPE)
        repr_digest = _repr_digest(call)
        prior = call.field_hex(PRIOR_FIELD, HASH_OCTETS)
        limit = self.holder.settings.max_container_octets
        call.refuse_length(limit)
        if block in self.holder.store:
            self.holder.store.rejected("exists")
            raise _exists()
        descriptor = await self._descriptor(block.compat_id)
        chunks = call.stream_body(limit)
        try:
            async with contextlib.aclosing(chunks):
                info = await self.holder.put(
                    block,
                    descriptor,
                    chunks,
                    repr_digest,
                    client=call.principal.name,
                    prior=prior,
                )
        except BlockExistsError:
            raise _exists() from None
        except NoRoomError:
            wait = self.holder.leases.next_end(self.holder.clock())
            raise Problem(
                ProblemName.STORAGE_FULL,
                "everything that could make room is leased, or the block is larger than a tier",
                retry_after=wait,
            ) from None
        except TierFullError as error:
            raise Problem(
                ProblemName.STORAGE_FULL, str(error), retry_after=_FULL_RETRY_S
            ) from error
        except ClientBusyError as error:
            raise _wait(error) from error
        except (TierUnavailableError, BusyError) as error:
            raise _not_now(error) from error
        except ContainerTooLargeError:
            raise too_large("the container", limit) from None
        except DecodeError as error:
            raise _invalid_container(error) from None
        stored = StoredBlock(info.digest, info.layer_digests, info.size, int(info.codec))
        location = call.base_uri + block_path(block)
        return json_response(stored.to_dict(), 201, {"Location": location})

    async def _delete(self, call: Call) -> Response:
        block = self._authorized(call, WRITE)
        try:
            await self.holder.delete(block)
        except MissError as error:
            raise _miss(error, None) from None
        except LeasedError as error:
            raise Problem(
                ProblemName.LEASED,
                f"the block is leased for {error.ttl_ms} ms more",
                ttl_ms=error.ttl_ms,
                retry_after=error.ttl_ms / 1000,
            ) from None
        except TierUnavailableError as error:
            raise _not_now(error) from error
        return no_content()

    async def _verify(self, call: Call) -> Response:
        """204 for a block whose copies are sound; 404 for one that is not here (any more)."""
        block = self._authorized(call, READ)
        try:
            sound = await self.holder.doubted(block, client=call.principal.name)
        except MissError as error:
            raise _miss(error, None) from None
        except ClientBusyError as error:
            raise _wait(error) from error
        except (TierUnavailableError, BusyError) as error:
            raise _not_now(error) from error
        if not sound and block not in self.holder.store:
            raise _miss(MissError(MissReason.LOST), None)
        return no_content()

    def _authorized(self, call: Call, right: Right) -> BlockId:
        """The block of the path. Whether it exists is not looked at before the right is."""
        try:
            block = parse_block_id(**call.path_params)
        except DecodeError as error:
            raise Problem.from_decode_error(error) from None
        self._require(call, block.scope_id, right)
        return block

    def _require(self, call: Call, scope_id: bytes, right: Right) -> None:
        if not call.principal.may(scope_id, right):
            self.holder.store.counters.misses[MissReason.UNAUTHORIZED] += 1
        call.principal.require(scope_id, right)

    async def _descriptor(self, compat_id: bytes) -> Descriptor:
        try:
            descriptor = await self._descriptors.get(compat_id)
        except (IndexUnavailableError, IndexRefusedError) as error:
            why = "refused" if isinstance(error, IndexRefusedError) else "could not be reached"
            raise Problem.http(
                503,
                f"the index service {why} when this holder asked it for the descriptor; "
                "the holder's log says why",
                retry_after=_BUSY_RETRY_S,
            ) from error
        if descriptor is None:
            raise Problem(
                ProblemName.COMPAT_UNKNOWN,
                "store the descriptor of this Compatibility ID at the index service first",
            )
        return descriptor

    async def _show_descriptor(self, call: Call) -> Response:
        compat_id = parse_compat_id(call.path_params["compat"])
        try:
            descriptor = await self._descriptor(compat_id)
        except Problem as problem:
            if problem.name is not ProblemName.COMPAT_UNKNOWN:
                raise
            raise Problem(
                ProblemName.UNKNOWN_RESOURCE, "no descriptor of this Compatibility ID is here"
            ) from None
        return Response(descriptor.jcs, media_type=JSON_MEDIA_TYPE)

    # --- leases ----------------------------------------------------------------------

    async def _acquire(self, call: Call) -> Response:
        request = await call.read_record(LeaseRequest)
        self._require(call, request.scope_id, READ)
        most = self.holder.leases.quota.request_keys
        if len(request.block_keys) > most:
            raise too_large("the list of block keys", most)
        blocks = [
            BlockId(request.compat_id, request.scope_id, key)
            for key in dict.fromkeys(request.block_keys)
        ]
        try:
            lease = await self.holder.lease(call.principal.name, blocks, request.ttl_ms)
        except LeaseQuotaError as error:
            raise self._over_quota(error) from None
        except LeaseJournalError as error:
            raise _not_kept(error) from error
        if lease is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "none of the blocks is held")
        location = call.base_uri + lease_path(lease.lease_id)
        return _grant(lease, lease.ttl_ms, 201, {"Location": location})

    async def _renew(self, call: Call) -> Response:
        lease_id = _lease_id(call)
        ttl_ms = (await call.read_record(TtlAnswer)).ttl_ms
        try:
            lease = await self.holder.renew(call.principal.name, lease_id, ttl_ms)
        except LeaseQuotaError as error:
            raise self._over_quota(error) from None
        except LeaseJournalError as error:
            raise _not_kept(error) from error
        if lease is None:
            raise _no_lease()
        return _grant(lease, lease.ttl_ms)

    async def _show_lease(self, call: Call) -> Response:
        now = self.holder.clock()
        lease = self.holder.leases.get(call.principal.name, _lease_id(call), now)
        if lease is None:
            raise _no_lease()
        return _grant(lease, max(1, int((lease.expires - now) * 1000)))

    async def _release(self, call: Call) -> Response:
        released = self.holder.leases.release(
            call.principal.name, _lease_id(call), self.holder.clock()
        )
        if not released:
            raise _no_lease()
        return no_content()

    def _over_quota(self, error: LeaseQuotaError) -> Problem:
        quota = self.holder.leases.quota
        return Problem(
            ProblemName.LEASE_QUOTA,
            error.detail,
            retry_after=error.retry_after,
            max_ttl_ms=quota.ttl_ms,
            max_octets=quota.octets,
            available_octets=error.available,
        )


def _selection(call: Call) -> tuple[range | None, int | None]:
    try:
        layers, codec = call.query("layers"), call.query("codec")
        return (
            None if layers is None else parse_layers(layers),
            None if codec is None else parse_codec(codec),
        )
    except DecodeError as error:
        raise Problem.from_decode_error(error) from None


def _repr_digest(call: Call) -> bytes | None:
    field = call.headers.get("repr-digest")
    return None if field is None else parse_repr_digest(field)


def _matches(field: str | None, etag: str) -> bool:
    """Whether an If-None-Match field names the representation (weak comparison)."""
    if field is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in field.split(",")]
    return "*" in tags or etag in tags


def _miss(error: MissError, layers: range | None) -> Problem:
    if error.reason is MissReason.LAYERS:
        asked = layers_parameter(layers) if layers is not None else "all layers"
        return Problem(
            ProblemName.LAYERS_UNAVAILABLE,
            f"not all of {asked} are held; ask for available ones or another holder",
            available=[[held.start, held.stop - 1] for held in error.available],
        )
    return Problem(
        ProblemName.UNKNOWN_RESOURCE,
        "the block is not held; take another replica or compute it",
        reason=str(error.reason),
    )


def _exists() -> Problem:
    return Problem(ProblemName.BLOCK_EXISTS, "the block is held already; its copy stays")


def _not_now(error: Exception) -> Problem:
    wait_s = error.retry_after_s if isinstance(error, TierUnavailableError) else None
    return Problem.http(503, str(error), retry_after=wait_s or _BUSY_RETRY_S)


def _wait(error: ClientBusyError) -> Problem:
    return Problem.http(429, str(error), retry_after=_BUSY_RETRY_S)


def _invalid_container(error: DecodeError) -> Problem:
    if error.name is DecodeErrorName.CODEC_UNSUPPORTED:
        codecs = [int(codec) for codec in Codec]
        return Problem(ProblemName.CODEC_UNSUPPORTED, error.detail, status=422, codecs=codecs)
    name = (
        ProblemName.DIGEST_MISMATCH
        if error.name is DecodeErrorName.DIGEST_MISMATCH
        else ProblemName.INVALID_CONTAINER
    )
    return Problem(name, error.detail, error=str(error.name))


def _lease_id(call: Call) -> str:
    return check_uuid(call.path_params["lease"])


def _not_kept(error: LeaseJournalError) -> Problem:
    logger.error("a lease cannot be kept: %s", error)
    return Problem.http(
        503, "the holder cannot keep a lease now; its log says why", retry_after=_FULL_RETRY_S
    )


def _no_lease() -> Problem:
    return Problem(
        ProblemName.UNKNOWN_RESOURCE, "you have no such lease; it may have ended: ask for a new one"
    )


def _grant(
    lease: Lease, ttl_ms: int, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    grant = LeaseGrant(lease.lease_id, ttl_ms, _keys(lease.blocks), _keys(lease.missing))
    return json_response(grant.to_dict(), status, headers)


def _keys(blocks: Iterable[BlockId]) -> tuple[bytes, ...]:
    return tuple(block.block_key for block in blocks)
