// Made by scripts/statistics_schema.py --write from src/polyattn/trace/recorders/torch/native_protocol.py.
#pragma once

#include <nanobind/nanobind.h>

namespace polyattn {

namespace trace_event {
// of its record
constexpr int kSeq = 0;
// the text that all records of a module share, of `head_of`
constexpr int kHead = 1;
// which call of the module
constexpr int kCall = 2;
// or None
constexpr int kStep = 3;
// in, out, ...
constexpr int kPhase = 4;
// which tensor: args[0], out, ...
constexpr int kPath = 5;
// a tuple; None where `same` is given
constexpr int kShape = 6;
// torch's, or a text; None where `same` is given
constexpr int kDtype = 7;
// the Rows that have its numbers, or None where it has none
constexpr int kRows = 8;
// which row of them
constexpr int kSlot = 9;
// the seq of the record whose numbers it has, or None
constexpr int kSame = 10;
// further fields, or None; as text where native code makes the line
constexpr int kExtra = 11;
// a file to be written first, or None
constexpr int kSaving = 12;
// all of them
constexpr int kPlaces = 13;
}  // namespace trace_event

namespace trace_seen {
// a weak reference
constexpr int kTensor = 0;
// of the tensor when it was read
constexpr int kVersion = 1;
// of its record
constexpr int kSeq = 2;
// that has the whole tensor, or None
constexpr int kFile = 3;
// all of them
constexpr int kPlaces = 4;
}  // namespace trace_seen

namespace trace_block {
// the object that events name
constexpr int kRows = 0;
// of the first row
constexpr int kAddress = 1;
// how many rows there are
constexpr int kUsed = 2;
// all of them
constexpr int kPlaces = 3;
}  // namespace trace_block

// Names of attributes, as Python's own texts; made once.
struct Attributes {
  // Lane.events: the list that events are added to
  PyObject* events = PyUnicode_InternFromString("events");
  // Lane.rows: the Rows that are being filled, by device
  PyObject* rows = PyUnicode_InternFromString("rows");
  // Lane.seen: the tensors that were recorded, by id
  PyObject* seen = PyUnicode_InternFromString("seen");
  // Rows.first: the address of the first row
  PyObject* first = PyUnicode_InternFromString("first");
  // Rows.isa: the index of the instruction set that fills them
  PyObject* isa = PyUnicode_InternFromString("isa");
  // Rows.size: how many rows there are
  PyObject* size = PyUnicode_InternFromString("size");
  // Rows.used: how many are filled; native code sets it
  PyObject* used = PyUnicode_InternFromString("used");
  // JsonlSink.direct_to: the file descriptor to write whole lines to, or -1
  PyObject* direct_to = PyUnicode_InternFromString("direct_to");
  // JsonlSink.cut_off: called after a write that failed
  PyObject* cut_off = PyUnicode_InternFromString("cut_off");
  // Tensor._version: counts changes in place
  PyObject* version = PyUnicode_InternFromString("_version");
  // Tensor.data_ptr: called
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  // Tensor.dtype: a key of the elements that the kernel reads
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  // Tensor.is_cpu
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  // Tensor.is_inference: called: such a tensor has no version
  PyObject* is_inference = PyUnicode_InternFromString("is_inference");
  // Tensor.is_neg: called
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  // Tensor.is_nested
  PyObject* is_nested = PyUnicode_InternFromString("is_nested");
  // Tensor.layout
  PyObject* layout = PyUnicode_InternFromString("layout");
  // Tensor.shape: a tuple
  PyObject* shape = PyUnicode_InternFromString("shape");
  // Tensor.stride: called
  PyObject* stride = PyUnicode_InternFromString("stride");
};

// Places and names as text, which Python compares with its own.
constexpr char kTraceProtocol[] =
    "event: seq head call step phase path shape dtype rows slot same extra saving; seen: tensor "
    "version seq file; block: rows address used; Lane: events rows seen; Rows: first isa size "
    "used; JsonlSink: direct_to cut_off; Tensor: _version data_ptr dtype is_cpu is_inference "
    "is_neg is_nested layout shape stride";

}  // namespace polyattn
