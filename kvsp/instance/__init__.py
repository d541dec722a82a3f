"""The inference instance: an agent between an engine and the other services of KVSP."""
