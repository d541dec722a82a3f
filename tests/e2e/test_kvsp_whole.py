"""Two controllers, two indexes, three holders and three instances: any one of them is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kvsp_rounds import rounds


@pytest.mark.timeout(300)
def test_whatever_is_killed_no_token_is_lost_no_octet_wrong_and_every_block_is_found_again(
    tmp_path: Path,
) -> None:
    result = rounds(3, 1, tmp_path, roles=("controller", "instance", "index"))
    assert result["wrong"] is None
    assert (result["rounds"], result["sessions"]) == (3, 6)
    assert result["blocks_read"] and result["blocks_stored"]
