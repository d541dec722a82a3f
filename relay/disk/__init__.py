"""The cache's second tier: whole tracks in files, one a track, that outlive the process.

What is decided (`tier`, `keeping`) is plain code that hands jobs to a worker; what those do with
files stands in `files`, the octets in `records`, the threads in `threads`. It imports `moqt` and
`relay.config`.
"""
