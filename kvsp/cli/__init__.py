"""The programs `kvsp` and `kvsp-server`: options, output, exit codes.

`entry` is where both begin; `program` and `server` are the two, `blocks` and `operations` the
commands of the first.

The top floor: imports everything of KVSP it needs, and nothing imports it.
"""
