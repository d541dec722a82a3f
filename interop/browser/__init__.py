"""A browser as the peer: a page's MOQT over the browser's own WebTransport, HTTP/3 and QUIC.

`chromium` finds and starts the browser, `page` serves the page and has it do things, `cases` are
what it does, `listener` is the other end where the relay is none, `program` runs them. The page
(`static/`) knows no more of MOQT than the cases need: what is tried is the browser's transport.
"""
