"""What ends the program with one sentence."""

from __future__ import annotations


class Usage(Exception):
    """The settings cannot be meant; the message is the sentence to show."""


class Failure(Exception):
    """The relay cannot run; the message is the sentence to show."""
