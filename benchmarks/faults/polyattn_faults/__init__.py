"""Bugs of many kinds seeded into real models, and whom the trace names for them."""
