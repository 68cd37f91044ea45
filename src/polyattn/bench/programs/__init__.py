"""Whole models, as their libraries run them by default and with polyattn switched on."""
