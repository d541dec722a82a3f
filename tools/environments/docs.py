"""MkDocs, which makes the site: `make docs` runs it."""

from __future__ import annotations

from tools.environments.own import Environment, main


def install(environment: Environment) -> None:
    """The generator."""
    environment.install("mkdocs==1.6.1")


if __name__ == "__main__":
    main("docs", __doc__, install)
