"""A face: what a program asked of attention, recorded, and its file. It is in `program`."""

from polyattn.integrations.program.asked import Case, Passed, Ran, Record
from polyattn.integrations.program.record_file import read_record, write_record
from polyattn.integrations.program.recorder import Recorder

__all__ = ["Case", "Passed", "Ran", "Record", "Recorder", "read_record", "write_record"]
