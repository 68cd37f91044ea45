"""One model of transformers: eager beside polyattn, each measured against eager in float64."""

from __future__ import annotations
