"""Bridges to programs and libraries that know nothing of polyattn."""
