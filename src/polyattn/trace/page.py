"""A face: the page of a comparison is `polyattn.report.verdict`, and keeps this name."""

from polyattn.report.verdict import page, write_page

__all__ = ["page", "write_page"]
