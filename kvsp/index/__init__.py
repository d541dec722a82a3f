"""The Index Service: which holder has which layers of which block (KVSP "Publishing and
Withdrawing Replicas", "Lookup")."""
