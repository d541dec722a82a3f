"""Layers of many blocks from many holders at once.

`planner`, `sources` and `flights` decide what is asked for from whom and `receiving` checks
what comes, all without I/O; `retrieval` is the shell around them, `doubts` tells holders of
what was wrong.

Stands below `kvsp.client.client` and imports `caller`, `errors`, `limits` and `policy` of the
client, never the client itself.
"""
