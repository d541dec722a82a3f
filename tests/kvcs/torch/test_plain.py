"""What `kvcs.torch` says where torch is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvcs.torch

WITHOUT = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import kvcs, kvcs.torch
from kvcs.torch import CacheLost
assert CacheLost is kvcs.CacheLost
try:
    kvcs.torch.StreamedCache
except ImportError as error:
    print(error)
"""


def test_without_torch_it_says_what_to_install():
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert ran.stdout.strip() == (
        "kvcs.torch.StreamedCache needs torch and transformers 5: pip install 'kvcs[torch]'"
    ), ran.stderr


def test_what_it_does_not_have_is_no_attribute():
    with pytest.raises(AttributeError, match="Nothing"):
        _ = kvcs.torch.Nothing
