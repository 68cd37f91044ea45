"""The command line: parses, calls, prints; what it shows is computed by the parts below."""

from polyattn.cli.commands import main

__all__ = ["main"]
