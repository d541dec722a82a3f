"""What is kept for the next time: the verified Objects of a retrieval that was cut short
(`resume_file`),
and what has failed lately (`failures`).

Stands on `kvcs.names`, `kvsp.blocks` and `kvsp.names`; knows no session and no event loop.
"""
