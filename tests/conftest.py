"""Settings that every test shares."""

from __future__ import annotations

import signal

from hypothesis import settings

# A slow machine is not a failure: speed is measured by `make bench`, never asserted here.
settings.register_profile("kvcs", deadline=None, print_blob=True)
settings.load_profile("kvcs")

# Programs leave alone the signals that they were started with as ignored, and what runs beside
# others, or under nohup, is so: those that tests start and stop have them as a shell gives them.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number,
            signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL,
        )
