"""Where a track's Objects come from: subscriptions and FETCHes upstream.

`candidates` says who is asked for it, and who next when they have not got it, or lose it.
`filling` puts Objects into the store, whoever brings them; `receiver` is what every upstream
request does with its streams; `subscriptions` and `fetches` are those requests; `missing`
chooses what is fetched. They see a track as `filled` says (and `Subscribed`, `Asking` beside
their users), never `relay.track` itself. Imports `relay.cache`, `relay.config` and moqt.
"""
