"""What is kept for the next time: the verified Objects of a retrieval that was cut short
(`resume_file`),
and what has failed lately (`failures`).

Stands on `kvcs.names`, `kvsp.blocks` and `kvsp.names`, and on `kvsp.holder.uninterrupted` for
what a disk does beside an event loop; knows no session.
"""
