"""One Track as a publisher or a relay holds it: Objects, what is known of gaps and ends, filters.

`store` is the log that cursors read, `stored` its records, `listeners` what it knows of those
around it; `malformed` notices the same faults without a store. Sans-IO, time is a parameter.
May import `moqt.wire` and `moqt.values`; never who delivers, receives or asks for a Track.
"""
