"""Short programs that show one thing each; README.md lists them."""
