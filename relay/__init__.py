"""The caching relay: one `Relay` for each scope, and the process around it.

Floors, each importing only what is below it: `service`; `mesh`, `scopes`, `withdrawals`;
`core` (the sessions' handler); `track`; `audience` (who asks); `sources` (who is asked),
`rights` (who may); `cache`; `config`. Below all stands `moqt`; nothing here knows of KV caches.
All but `service` and `mesh.uplink_client` is sans-IO, time comes with `tick`; of files,
`rights.tokens` reads that of principals.
"""
