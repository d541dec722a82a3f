"""Who asks downstream: for tracks, for namespaces, for whatever is published.

`downstream` is one track's side of it, `readers` its requests by session, `waiting` the requests
without an answer, `offers` SUBSCRIBE_TRACKS, `namespaces` who publishes and who listens, `prefixes`
the table they are looked up in. Imports `relay.rights` and what is below; to it a track is an
`Offered`.
"""
