"""Inference engines, and the blocks in their memory.

`engine` says what an instance needs of one; `toy` and `torch_engine` are two. `pool` counts
the blocks in an engine's memory, `samplers` choose tokens in a way that can be continued
elsewhere.

Imports `kvsp.records`, `kvsp.blocks` and `kvsp.names`; nothing else of the instance.
"""
