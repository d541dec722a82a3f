"""The `kvsp` command line."""
