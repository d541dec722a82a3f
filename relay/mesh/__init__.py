"""A relay behind a relay: `uplink` is what it asks and tells there, `uplink_client` keeps the
connection.

Stands on `relay.core`; the relay itself knows only which of its sessions are upstream.
"""
