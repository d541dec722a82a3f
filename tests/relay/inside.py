"""Where tests of the relay look inside: what no interface of it shows, each named once."""

from __future__ import annotations

import relay.cache


def is_empty(table):
    """Whether a PrefixMap holds nothing, and remembers no prefix of what it held."""
    return not table._exact and not table._below


def make_room(cache, octets):
    """Evict as for so many octets that come, and bill nothing."""
    return cache._make_room(octets)


def gaps_left_out(fetch):
    """How many gaps an upstream FETCH has left out so far."""
    return len(fetch._gaps)


def ages_looked_at(monkeypatch):
    """The entries of which a cache asks from now on whether their Object is still there."""
    entries = []
    aged = relay.cache._aged

    def noted(store, entry):
        entries.append(entry)
        return aged(store, entry)

    monkeypatch.setattr(relay.cache, "_aged", noted)
    return entries


def queued(ranges):
    """The Locations that a track's FETCHes, running or waiting, are to bring."""
    return ranges._queued


def feeds(filling):
    """How many streams bring each open subgroup."""
    return filling._feeds


def accept_fetch(request, message):
    """Answer a FETCH with just this FETCH_OK; what its stream carries is the test's."""
    request._accept(message)


def publishers(namespaces):
    """The namespaces that each session has published."""
    return namespaces._published_by


def aging(cache):
    """What a cache keeps of Objects that expire."""
    return [*cache._aging, *range(len(cache._expiries))]


def expiries(disk):
    """How many times a disk tier remembers at which something of it expires."""
    return len(disk._expiries)


def left_on_disk(scopes):
    """The paths of which it is remembered what the disk has, whoever is in them."""
    return list(scopes._on_disk)
