"""Why what came may be believed: signed manifests, sealed Objects, and the terms of a consumer.

`cose` is the envelope of "manifest.cose", `producers` the keys it is signed and verified with,
`pieces` how both treat what is long,
`sealing` the secure objects that relays cannot read, `records` what an index service vouches for.
`terms` says what a consumer asks of a publication before it uses anything of it. All of it is
sans-IO; nothing here shows a secret.

Imports `kvcs.names`, `kvsp.names`, `kvsp.records` and the values and octets of `moqt`, no session.
"""
