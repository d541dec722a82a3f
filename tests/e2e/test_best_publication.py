"""Never another prompt's cache, and the best publication there is: each program a process."""

from __future__ import annotations

import json


def test_a_scope_whose_caches_are_to_be_sealed_is_not_published_in_clear(cache, hub):
    keys = json.loads(cache.scope.read_text())
    cache.scope.write_text(json.dumps({**keys, "content_keys": [{"kid": 1, "key": "00" * 32}]}))
    refused = hub.publish(cache).finish(2)
    assert "published in clear" in refused.stderr and keys["scope_key"] not in refused.stderr
    assert hub.metric("namespaces") == 0
