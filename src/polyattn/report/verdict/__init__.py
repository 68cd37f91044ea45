"""A comparison as a page: one HTML file with the verdict, the error's growth, the layers and rows.

:func:`page` makes the text of it, :func:`write_page` the file. It needs nothing but a browser: no
network, no library, and no script where none is allowed, since the verdict and a table are plain
HTML. Names from traces are data in it and never markup. No framework is needed, nor NumPy.
"""

from polyattn.report.verdict.page import page, write_page

__all__ = ["page", "write_page"]
