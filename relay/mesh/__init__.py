"""A relay among others. Behind one: `uplink` is what it asks and tells there, `uplink_client` keeps
the connection. In a mesh: `directory` says who has what, `listings` asks all who have something
below a prefix, `directory_client` keeps the connections, `directory_store` knows the server.

Stands on `relay.core`; the relay itself knows only which of its sessions are upstream.
"""
