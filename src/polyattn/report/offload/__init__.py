"""The page of an offload's report."""

from polyattn.report.offload.offload_page import page, write_page

__all__ = ["page", "write_page"]
