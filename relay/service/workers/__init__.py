"""`--workers N`: one relay in several processes. `supervisor` is what the operator started: it has
the sockets and starts the others (`process`), again when they die, and answers for all of them
(`gathered`) over a `channel` to each. N edges (`edge`) take clients; what publishers bring goes on
to the one home (`home`), which has the cache, the disk and the upstream relays, and each edge gets
every Object from it once.

It imports all of the relay, and of `relay.service` what stands below `cli`.
"""
