"""What a program's attention ran on: as lines of text, as plain data, and as a page.

All three are made from a record (`integrations.program`) and from nothing else, so they are the
same right after a run and long after. No framework is needed.
"""

from polyattn.report.program.as_data import to_dict
from polyattn.report.program.program_page import page, write_page
from polyattn.report.program.program_text import lines

__all__ = ["lines", "page", "to_dict", "write_page"]
