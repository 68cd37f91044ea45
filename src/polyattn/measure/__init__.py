"""Tuning runs: the problems of a program, timed on every backend that gets them right."""
