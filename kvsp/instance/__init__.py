"""The inference instance: an agent between an engine and the other services of KVSP.

`core` decides, `engines` compute, `shell` starts and connects the parts that carry out:
`serving`, `loading`, `prefetching` with `kept_directives`, `resharding`, `reporting`. `app`
speaks HTTP, `callers` reach the placement controller.

Stands beside `kvsp.controller`, above `kvsp.holder`: an instance is the holder of what is in
its memory. Imports `kvsp.http` and `kvsp.client` and what is below them.
"""
