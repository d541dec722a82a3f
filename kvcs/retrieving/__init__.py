"""A consumer's retrieval, from the request to the usable layer.

`consumer` (asyncio) → `contest` (which publication), `lanes` (over which connections) →
`retrieval` (what to ask for, sans-IO) → `receivers` and `manifest_track` (callbacks) →
`assembly` (is it right?) → `layers`, `open_layer` (its place) → `destinations`. `fallback` asks
holders over HTTP, `block_fetcher` retrieves for instances.

Stands on `finding` and `names`. Never imports `publishing` or `programs`; HTTP is imported by
`fallback` and `block_fetcher` alone.
"""
