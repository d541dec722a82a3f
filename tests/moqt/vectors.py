"""The MOQT vectors that need more than a codec."""

from __future__ import annotations

# What only a session can refuse, by what it has to know. The session's tests cover these.
NEEDS_SESSION = {
    "GOAWAY with URI received by a server": "which endpoint we are",
    "two GOAWAY on one stream": "what came before on the stream",
    "request ID 1 from a client": "which endpoint we are",
    "request ID 0 used twice (two streams)": "the IDs seen",
    "PUBLISH_STATE_NOTIFY from the subscriber": "who is the publisher",
    "request stream FIN inside a message": "the FIN; the decoder says `buffered`",
    "NAMESPACE_DONE without its NAMESPACE": "the namespaces announced",
    "NAMESPACE before the response": "the state of the request",
    "Redirect with a Track Name answering SUBSCRIBE_NAMESPACE": "the request answered",
    "Redirect with a Connect URI received by a server": "which endpoint we are",
    "FETCH_OK end before the requested start {5,0}": "the range requested",
    "SUBSCRIBE_OK reusing alias of another established track": "the aliases in use",
    "more REQUEST_UPDATE outstanding than MAX_REQUEST_UPDATES": "the updates unanswered",
    "SETUP token DELETE to a server": "which endpoint we are",
    "SETUP with PATH from a server": "which endpoint we are",
    "SETUP with AUTHORITY from a server": "which endpoint we are",
    "second control stream": "the streams open",
    "control stream FIN": "the FIN",
    "token REGISTER with cache size 0, in SUBSCRIBE": "the cache size announced",
    "token REGISTER of an alias already registered": "the aliases registered",
    "subgroup FIN inside a payload": "the FIN; the decoder says `mid_object`",
    "FETCH with End before Start in one group": "a request error, given by the publisher",
    "SUBSCRIBE in namespace (.)": "a request error, given by the publisher",
    "SUBSCRIBE in unknown (.session)": "a request error, given by the publisher",
    "overlapping SUBSCRIBE_NAMESPACE (second of two)": "the prefixes subscribed to",
    "PUBLISH with unknown mandatory property 0x4001": "the properties understood",
}
