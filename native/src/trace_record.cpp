// The Python class polyattn._native.TraceRecord: what a trace does for each tensor of a call, when
// the tensor is a plain one on the CPU. Everything else it leaves to Recorder.record, in Python.
//
// Where nothing waits to be written before it, the line is with the operating system before the
// module goes on, so a killed process loses none: a line takes less than an event that a thread makes
// a line of, as long as little code and memory is touched that the model's own has displaced.
#include <nanobind/nanobind.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

#include "dispatch.h"
#include "module_parts.h"
#include "statistics/statistics.h"
#include "trace_lines.h"
#include "trace_protocol.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

nb::object taken(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

int64_t integer(nb::handle value) {
  const int64_t found = PyLong_AsLongLong(value.ptr());
  if (found == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return found;
}

class TraceRecord {
 public:
  // `tensor`: the class of plain tensors; `elements`: the kernel's code of each dtype it reads;
  // `strided`: the layout it reads; `device`: of what the kernel reads; `threads` and `next_seq`:
  // functions that give the number of threads to use and of the next record; `lines`, `sink`: what
  // makes and takes lines, None where all become events.
  TraceRecord(nb::object tensor, nb::dict elements, nb::object strided, nb::object device, nb::object threads,
              nb::object next_seq, nb::object lines, nb::object sink)
      : tensor_(std::move(tensor)), elements_(std::move(elements)), strided_(std::move(strided)),
        device_(std::move(device)), threads_(std::move(threads)), next_seq_(std::move(next_seq)),
        kept_lines_(std::move(lines)), sink_(std::move(sink)),
        lines_(kept_lines_.is_none() ? nullptr : nb::cast<TraceLines*>(kept_lines_)) {}

  // How many lines it has written.
  int64_t written() const { return written_; }

  // Writes the lines of the tensors, or adds their events to the lane, up to the first that is left
  // to Python, and returns how many these are.
  Py_ssize_t record(nb::handle lane, const nb::list& found, nb::handle head, nb::handle call, nb::handle step,
                    nb::handle phase, bool compiled) {
    const Target to{lane, taken(PyObject_GetAttr(lane.ptr(), names_.seen)), {head, call, step, phase}};
    if (!PyDict_CheckExact(to.seen.ptr())) throw nb::type_error("lane: expected one that has seen");
    const Py_ssize_t size = PyList_GET_SIZE(found.ptr());
    Py_ssize_t done = 0;
    for (; done < size; ++done) {
      PyObject* const pair = PyList_GET_ITEM(found.ptr(), done);
      if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) throw nb::type_error("found: expected pairs");
      const nb::handle path = PyTuple_GET_ITEM(pair, 0), t = PyTuple_GET_ITEM(pair, 1);
      if (Py_TYPE(t.ptr()) != reinterpret_cast<PyTypeObject*>(tensor_.ptr())) break;
      if (!take(to, path, t, compiled)) break;
    }
    return done;
  }

 private:
  struct Target {
    nb::handle lane;
    nb::object seen;
    nb::handle place[4];  // head, call, step, phase
  };

  static nb::object get(nb::handle of, PyObject* name) { return taken(PyObject_GetAttr(of.ptr(), name)); }
  static nb::object call(nb::handle of, PyObject* name) {
    return taken(PyObject_CallMethodNoArgs(of.ptr(), name));
  }

  static bool refers(const nb::object& reference, nb::handle t) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* of = nullptr;
    if (PyWeakref_GetRef(reference.ptr(), &of) < 0) throw nb::python_error();
    const bool same = of == t.ptr();
    Py_XDECREF(of);
    return same;
#else
    return PyWeakref_GetObject(reference.ptr()) == t.ptr();
#endif
  }

  bool take(const Target& to, nb::handle path, nb::handle t, bool compiled) {
    // Compiled code changes tensors behind their version, and inference tensors have none.
    const bool unversioned = compiled || call(t, names_.is_inference).ptr() == Py_True;
    const nb::object id = taken(PyLong_FromVoidPtr(t.ptr()));
    const nb::object version = unversioned ? nb::none() : get(t, names_.version);
    if (!unversioned) {
      if (PyObject* hit = PyDict_GetItemWithError(to.seen.ptr(), id.ptr())) {
        const nb::tuple known = nb::cast<nb::tuple>(nb::handle(hit));
        const bool same =
            refers(known[trace_seen::kTensor], t) && integer(known[trace_seen::kVersion]) == integer(version);
        if (same) return add_same(to, path, known[trace_seen::kSeq].ptr()), true;
      } else if (PyErr_Occurred() != nullptr) {
        throw nb::python_error();
      }
    }
    const nb::object of_devices = get(to.lane, names_.rows);
    const nb::object rows = nb::borrow(PyDict_GetItemWithError(of_devices.ptr(), device_.ptr()));
    if (!rows.is_valid()) return PyErr_Occurred() != nullptr ? throw nb::python_error() : false;
    const int64_t slot = integer(get(rows, names_.used));
    if (slot < 0 || slot >= integer(get(rows, names_.size))) return false;
    nb::object shape, dtype;
    try {
      shape = get(t, names_.shape);
      dtype = get(t, names_.dtype);
      if (!summarized(rows, t, shape, dtype, slot)) return false;
    } catch (nb::python_error& error) {  // not every tensor answers: a nested one has no shape
      if (!error.matches(PyExc_Exception)) throw;
      return false;
    }
    nb::object seq = written_now(to, path, shape, dtype, row_of(rows, slot));
    if (!seq.is_valid()) {
      if (PyObject_SetAttr(rows.ptr(), names_.used, nb::int_(slot + 1).ptr()) != 0) {
        throw nb::python_error();
      }
      seq = add(to, path, shape.ptr(), dtype.ptr(), rows.ptr(), slot, Py_None);
    }
    if (!unversioned) {
      const nb::object ref = taken(PyWeakref_NewRef(t.ptr(), nullptr));
      const nb::object entry =
          taken(PyTuple_Pack(trace_seen::kPlaces, ref.ptr(), version.ptr(), seq.ptr(), Py_None));
      if (PyDict_SetItem(to.seen.ptr(), id.ptr(), entry.ptr()) != 0) throw nb::python_error();
    }
    return true;
  }

  // Whether the kernel has read the tensor into the row.
  bool summarized(nb::handle rows, nb::handle t, nb::handle shape, nb::handle dtype, int64_t slot) const {
    PyObject* element = PyDict_GetItemWithError(elements_.ptr(), dtype.ptr());
    if (element == nullptr) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return false;
    }
    const bool plain = get(t, names_.is_cpu).ptr() == Py_True &&
                       get(t, names_.layout).ptr() == strided_.ptr() &&
                       call(t, names_.is_neg).ptr() == Py_False && get(t, names_.is_nested).ptr() == Py_False;
    if (!plain || !PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) > kMaxDims) return false;
    const nb::object stride = call(t, names_.stride);
    if (!PyTuple_Check(stride.ptr()) || PyTuple_GET_SIZE(stride.ptr()) != PyTuple_GET_SIZE(shape.ptr())) {
      return false;
    }
    Tensor tensor;
    tensor.data = reinterpret_cast<const void*>(static_cast<intptr_t>(integer(call(t, names_.data_ptr))));
    tensor.element = static_cast<Element>(integer(element));
    tensor.dims = static_cast<int32_t>(PyTuple_GET_SIZE(shape.ptr()));
    for (int i = 0; i < tensor.dims; ++i) {
      tensor.sizes[i] = integer(PyTuple_GET_ITEM(shape.ptr(), i));
      tensor.strides[i] = integer(PyTuple_GET_ITEM(stride.ptr(), i));
    }
    if (check(tensor) != nullptr) return false;
    const auto isa = static_cast<int>(integer(get(rows, names_.isa)));
    const auto threads = static_cast<int>(integer(taken(PyObject_CallNoArgs(threads_.ptr()))));
    return summarize_unlocked(isa, threads, tensor, row_of(rows, slot));
  }

  double* row_of(nb::handle rows, int64_t slot) const {
    const auto first = static_cast<intptr_t>(integer(get(rows, names_.first)));
    return reinterpret_cast<double*>(first) + slot * kFields;
  }

  // The file to write to at once, or -1. It holds until the interpreter's lock is given up.
  int direct_to(const Target& to) const {
    if (lines_ == nullptr || lines_->busy()) return -1;
    const nb::object events = get(to.lane, names_.events);
    if (!PyList_Check(events.ptr()) || PyList_GET_SIZE(events.ptr()) != 0) return -1;
    return static_cast<int>(integer(get(sink_, names_.direct_to)));
  }

  static TracePlace place_of(const Target& to, std::string_view where) {
    return {to.place[0].ptr(), to.place[1].ptr(), to.place[2].ptr(), where};
  }

  // What is to be known before direct_to(): nothing that may call Python stands between it and the line.
  std::string where(const Target& to, nb::handle path) {
    std::string text = std::move(spare_where_);
    text.clear();
    if (lines_ != nullptr) lines_->append_where(text, to.place[3].ptr(), path.ptr());
    return text;
  }

  // Writes the line of a tensor and returns its seq; no object where an event has to be added.
  nb::object written_now(const Target& to, nb::handle path, nb::handle shape, nb::handle dtype,
                         const double* row) {
    std::string place = where(to, path);
    const int file = direct_to(to);
    if (file < 0 || !lines_->usual(dtype.ptr(), row)) return {};
    const nb::object seq = taken(PyObject_CallNoArgs(next_seq_.ptr()));
    std::string text = std::move(spare_);
    text.clear();
    lines_->line(text, place_of(to, place), integer(seq), shape.ptr(), dtype.ptr(), row);
    write(file, text);
    spare_ = std::move(text);
    spare_where_ = std::move(place);
    return seq;
  }

  void add_same(const Target& to, nb::handle path, PyObject* same) {
    std::string place = where(to, path);
    const int file = direct_to(to);
    if (file < 0) {
      add(to, path, nullptr, nullptr, nullptr, 0, same);
      return;
    }
    const nb::object seq = taken(PyObject_CallNoArgs(next_seq_.ptr()));
    std::string text = std::move(spare_);
    text.clear();
    lines_->line(text, place_of(to, place), integer(seq), integer(same));
    write(file, text);
    spare_ = std::move(text);
    spare_where_ = std::move(place);
  }

  // The lock stays held: nobody else may write in between, and the disk is not waited for.
  void write(int file, const std::string& text) {
    ++written_;
    size_t done = 0;
    while (done < text.size()) {
#ifdef _WIN32
      const auto took = ::_write(file, text.data() + done, static_cast<unsigned>(text.size() - done));
#else
      const auto took = ::write(file, text.data() + done, text.size() - done);
#endif
      if (took < 0 && errno == EINTR) continue;
      if (took <= 0) {
        const int error = took < 0 ? errno : EIO;
        --written_;
        sink_.attr(nb::handle(names_.cut_off))(error, nb::bytes(text.data(), text.size()), done);
        return;
      }
      done += static_cast<size_t>(took);
    }
  }

  // Adds one event and returns its seq. With `same` it has no shape, dtype and rows.
  nb::object add(const Target& to, nb::handle path, PyObject* shape, PyObject* dtype, PyObject* rows,
                 int64_t slot, PyObject* same) const {
    const auto or_none = [](PyObject* value) { return value == nullptr ? Py_None : value; };
    const nb::object seq = taken(PyObject_CallNoArgs(next_seq_.ptr()));
    const nb::int_ row(slot);
    PyObject* places[trace_event::kPlaces];
    for (PyObject*& place : places) place = Py_None;
    places[trace_event::kSeq] = seq.ptr();
    places[trace_event::kHead] = to.place[0].ptr();
    places[trace_event::kCall] = to.place[1].ptr();
    places[trace_event::kStep] = to.place[2].ptr();
    places[trace_event::kPhase] = to.place[3].ptr();
    places[trace_event::kPath] = path.ptr();
    places[trace_event::kShape] = or_none(shape);
    places[trace_event::kDtype] = or_none(dtype);
    places[trace_event::kRows] = or_none(rows);
    places[trace_event::kSlot] = row.ptr();
    places[trace_event::kSame] = same;
    const nb::object event = taken(PyTuple_New(trace_event::kPlaces));
    for (int i = 0; i < trace_event::kPlaces; ++i) PyTuple_SET_ITEM(event.ptr(), i, Py_NewRef(places[i]));
    const nb::object events = get(to.lane, names_.events);  // asked for late: they may have gone
    if (PyList_Append(events.ptr(), event.ptr()) != 0) throw nb::python_error();
    return seq;
  }

  const Attributes names_;
  nb::object tensor_;
  nb::dict elements_;
  nb::object strided_, device_, threads_, next_seq_, kept_lines_, sink_;
  TraceLines* lines_;
  std::string spare_, spare_where_;
  int64_t written_ = 0;
};

}  // namespace

void add_trace_record(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<TraceRecord>(m, "TraceRecord", "Events of a trace: see native/src/trace_record.cpp.")
      .def(nb::init<nb::object, nb::dict, nb::object, nb::object, nb::object, nb::object, nb::object,
                    nb::object>(),
           "tensor"_a, "elements"_a, "strided"_a, "device"_a, "threads"_a, "next_seq"_a,
           "lines"_a.none() = nb::none(), "sink"_a.none() = nb::none())
      .def_prop_ro("written", &TraceRecord::written, "How many lines it has written.")
      .def("record", &TraceRecord::record, "lane"_a, "found"_a, "head"_a, "call"_a, "step"_a.none(),
           "phase"_a, "compiled"_a,
           "Writes lines of plain tensors, or adds events to a lane; returns how many tensors.");
}

}  // namespace polyattn
