"""Who asks downstream: for tracks, for namespaces, for whatever is published.

`downstream` is one track's side of it, `waiting` the requests without an answer, `offers`
SUBSCRIBE_TRACKS, `namespaces` who publishes and who listens, `prefixes` the table they are
looked up in. Imports `relay.rights` and what is below; a track is an `Offered` to it.
"""
