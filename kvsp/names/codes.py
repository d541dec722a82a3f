"""Every registry, limit and error name of KVSP that both drafts share, in one table.

Element types, positional encodings and codecs other than `bf16`, `rope` and `raw`
are decisions of this project, as are all limits; the published registries may differ.
"""

from __future__ import annotations

import sys
from enum import IntEnum, StrEnum
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

HASH_OCTETS = 32
"""Octets of a Compatibility ID, a Block Key and every SHA-256 digest."""

SCOPE_ID_OCTETS = 16
MIN_SCOPE_KEY_OCTETS = 32
MAX_SCOPE_KEY_OCTETS = 1024
MAX_MODEL_OCTETS = 1024
MAX_GEOMETRY = (1 << 31) - 1
"""Largest `layers`, `kv_heads`, `head_dim` and `block_tokens`."""

MAX_TOKEN_ID = (1 << 32) - 1
MAX_SAFE_INTEGER = (1 << 53) - 1
"""Largest integer of I-JSON (RFC 7493, 2.2)."""

MAX_JSON_DEPTH = 64
"""Deepest nesting of arrays and objects that is read."""

MAX_SCOPE_FILE_OCTETS = 1 << 20
MAX_EPOCH = MAX_SAFE_INTEGER
MAX_TTL_MS = MAX_SAFE_INTEGER
"""Largest TTL that is read; a server cuts it to its own maximum."""

MAX_DIRECTIVE_MS = 600_000
"""Largest `deadline_ms` and `lease_ms`."""

MAX_CODEC = 0xFFFF
CONTAINER_MAGIC = b"KVB1"
CONTAINER_VERSION = 1
JSON_MEDIA_TYPE = "application/kvsp+json"
BLOCK_MEDIA_TYPE = "application/kvsp-block"
PRIOR_FIELD = "Kvsp-Prior-Block"
"""Ours: a field of a PUT of a block with the key of the block before it in its prompt."""
NAMESPACE_TAG = b"kvcs-1"
"""First field of the Track Namespace of every KVCS publication."""

NAMESPACE_FRAGMENT = "kvcs:"
"""What the fragment of a `moqt` URI starts with when a `moqt_namespace` text follows."""

LAYOUT_1 = "kvsp-layout-1"
DIGEST_PREFIX = "sha-256:"


class ElementType(StrEnum):
    """The "KVSP Element Types" registry: how one element of K or V is stored."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8-e4m3"
    FP8_E5M2 = "fp8-e5m2"
    INT8 = "int8"

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype, little-endian whatever the machine."""
        return _dtypes()[self]

    @property
    def octets(self) -> int:
        return self.dtype.itemsize


@cache
def _dtypes() -> dict[ElementType, np.dtype[np.generic]]:
    # imported on first use: who only names and finds blocks needs no arrays
    import ml_dtypes
    import numpy as np

    def little(scalar: type[np.generic]) -> np.dtype[np.generic]:
        # one that names its byte order is not numpy's own where that order is the machine's
        native: np.dtype[np.generic] = np.dtype(scalar)
        return native if sys.byteorder == "little" else native.newbyteorder("<")

    return {
        ElementType.BF16: little(ml_dtypes.bfloat16),
        ElementType.FP16: little(np.float16),
        ElementType.FP32: little(np.float32),
        ElementType.FP8_E4M3: little(ml_dtypes.float8_e4m3fn),
        ElementType.FP8_E5M2: little(ml_dtypes.float8_e5m2),
        ElementType.INT8: little(np.int8),
    }


class PositionalEncoding(StrEnum):
    """The "KVSP Positional Encodings" registry; other names start with `x-`."""

    NONE = "none"
    ROPE = "rope"
    ROPE_LINEAR = "rope-linear"
    ROPE_DYNAMIC = "rope-dynamic"
    ROPE_YARN = "rope-yarn"
    ROPE_LLAMA3 = "rope-llama3"
    ALIBI = "alibi"
    LEARNED = "learned"


class Codec(IntEnum):
    """The "KVSP Codecs" registry; 0 is reserved, 0xF000 and above are private use."""

    RAW = 0x0001
    X_ZLIB = 0xF001
    X_Q8 = 0xF002
    X_ZSTD = 0xF003

    @property
    def label(self) -> str:
        """The registered name, as in track names."""
        return self.name.lower().replace("_", "-")

    @property
    def lossless(self) -> bool:
        return self is not Codec.X_Q8

    @classmethod
    def from_label(cls, label: str) -> Codec | None:
        """The codec registered under `label`, or None."""
        return _CODEC_LABELS.get(label)


_CODEC_LABELS = {codec.label: codec for codec in Codec}


class CipherSuite(IntEnum):
    """Cipher suites of MOQ secure objects; 0xF000 and above are private use."""

    AES_128_CTR_HMAC_SHA256_80 = 0x0001
    AES_128_CTR_HMAC_SHA256_64 = 0x0002
    AES_128_CTR_HMAC_SHA256_32 = 0x0003
    AES_128_GCM_SHA256_128 = 0x0004
    AES_256_GCM_SHA512_128 = 0x0005

    @property
    def allowed(self) -> bool:
        """Whether KV caches may be sealed with it: a tag of 32 bits is too short for them."""
        return self is not CipherSuite.AES_128_CTR_HMAC_SHA256_32


class Tier(StrEnum):
    """Where layers of a replica reside (KVSP "Records"); other names are passed on."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class InstanceState(StrEnum):
    """The states of an instance (KVSP "Instance Status and Lifecycle")."""

    ACTIVE = "active"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    FAILED = "failed"


class DirectiveState(StrEnum):
    """The states of a directive (KVSP "Prefetch Directives")."""

    PENDING = "pending"
    PARTIAL = "partial"
    COMPLETE = "complete"
    FAILED = "failed"


class ReshardState(StrEnum):
    """What a member answers to a plan, a commit and an abort (KVSP "Resharding")."""

    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


class DecodeErrorName(StrEnum):
    """The one name each malformed input has."""

    # containers and payloads
    TRUNCATED = "truncated"
    BAD_MAGIC = "bad-magic"
    BAD_VERSION = "bad-version"
    CODEC_UNSUPPORTED = "codec-unsupported"
    ZERO_LAYERS = "zero-layers"
    LAYER_RANGE = "layer-range"
    TOKEN_COUNT = "token-count"
    SECTION_LENGTH = "section-length"
    TRAILING_OCTETS = "trailing-octets"
    DIGEST_MISMATCH = "digest-mismatch"
    COMPONENT_MISMATCH = "component-mismatch"
    LAYER_MISMATCH = "layer-mismatch"
    BLOCK_MISMATCH = "block-mismatch"
    TOKEN_START = "token-start"
    CODEC_MISMATCH = "codec-mismatch"
    # JSON, descriptors and records
    NOT_I_JSON = "not-i-json"
    DUPLICATE_MEMBER = "duplicate-member"
    NOT_AN_OBJECT = "not-an-object"
    MISSING_MEMBER = "missing-member"
    WRONG_TYPE = "wrong-type"
    EMPTY_ADAPTERS = "empty-adapters"
    OUT_OF_RANGE = "out-of-range"
    BAD_DIGEST = "bad-digest"
    BAD_POSITIONAL = "bad-positional"
    BAD_HEX = "bad-hex"
    BAD_URI = "bad-uri"
    # identity and names
    BAD_TOKEN = "bad-token"
    SHORT_SCOPE_KEY = "short-scope-key"
    BAD_TRACK_NAME = "bad-track-name"
    BAD_NAMESPACE = "bad-namespace"
    BAD_BASE64URL = "bad-base64url"
    # manifests
    BAD_MANIFEST = "bad-manifest"
    COMPAT_MISMATCH = "compat-mismatch"
    KEYS_MISMATCH = "keys-mismatch"
    # signed manifests and secure objects
    BAD_COSE = "bad-cose"
    BAD_SIGNATURE = "bad-signature"
    UNKNOWN_PRODUCER = "unknown-producer"
    NO_KEY_ID = "no-key-id"
    UNKNOWN_KEY_ID = "unknown-key-id"
    OBJECT_ID_RANGE = "object-id-range"
    AUTH_FAILED = "auth-failed"
    BAD_PROPERTIES = "bad-properties"
