"""The placement controller: instances, sessions, shard maps and where requests go
(KVSP "Instance Status and Lifecycle" to "Sequence-Sharded Caches and Resharding")."""
