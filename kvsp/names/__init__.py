"""The names of KVSP: codes, errors, identities of caches and blocks, URIs, I-JSON.

`codes` is the table of every registry value; `identity` says which caches are interchangeable
and what their blocks are called (KVSP 4.1, 4.2), `prefix` turns counts of
tokens into blocks. `content_keys` are what caches are sealed with. `ijson` reads JSON, a large
text in `pieces`. `private_files` is the one rule for files that hold keys, tokens or rights.

The ground floor: imports nothing else of this package.
"""
