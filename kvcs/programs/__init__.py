"""The command lines `kvcs-publish`, `kvcs-subscribe`, `kvcs-keygen`, `kvcs-inspect` and
`kvcs-doctor` (and `kvcs-explain`); `entry` is where the console scripts begin.

The top floor of `kvcs`: may import every other one, and `kvsp.cli` for what all command lines
share. Nothing imports it.
"""
