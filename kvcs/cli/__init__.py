"""The command-line programs of this package, one module each."""
