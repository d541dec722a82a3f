"""The Index Service: which holder has which layers of which block (KVSP "Publishing and
Withdrawing Replicas", "Lookup").

`service` and `status` decide, `store` is what they need of a store, `sqlite` and `redis` are
stores, `stored` is their form of a record; `arrivals` knows the records under way; `app`
speaks HTTP.

Stands beside `kvsp.holder`; imports `kvsp.http` (in `app` alone), `kvsp.principals`,
`kvsp.records` and `kvsp.names`.
"""
