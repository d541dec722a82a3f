"""The command lines `kvcs-publish`, `kvcs-subscribe` and `kvcs-keygen`; `entry` is where the
console scripts begin.

The top floor of `kvcs`: may import every other one, and `kvsp.cli` for what all command lines
share. Nothing imports it.
"""
