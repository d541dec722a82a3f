"""How long a retrieval waits before it asks again, and how much it asks for at a time."""

from __future__ import annotations

from typing import Final

RECOVERY_DELAYS: Final = (0.0, 0.1, 0.25)
"""Seconds before a FETCH for missing Objects, by how many in a row brought nothing; after
the last the publication is given up."""

REOPEN_GRACE: Final = 0.1
"""Seconds a reset Subgroup stream may take to be continued on another stream."""

PATIENCE: Final = 10.0
"""Seconds that a subscription may stand, and neither it nor any FETCH bring what is missing."""

RECOVERY_PAUSE: Final = 1.0
"""Seconds between such FETCHes."""

CONFIRM_GRACE: Final = 1.0
"""Seconds to wait, with every layer handed over, for the manifest to list them. It does so
at once at the end of a publication; a part of one still in production is not worth more."""

SEGMENTS_AT_ONCE: Final = 16
"""Segments whose tracks are asked for at a time, from the first that is not whole."""
