#include "trace_lines.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <utility>

#include "module_parts.h"
#include "trace_protocol.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

using namespace trace_event;  // its places

// Few lines are written sooner than others could have been given the interpreter's lock.
constexpr size_t kWorthReleasing = 16;

int64_t integer(PyObject* value) {
  const int64_t found = PyLong_AsLongLong(value);
  if (found == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return found;
}

std::string_view text_of(PyObject* value) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(value, &size);
  if (data == nullptr) throw nb::python_error();
  return {data, static_cast<size_t>(size)};
}

// One thread at a time: the second one is told so, for waiting could block both.
class Turn {
 public:
  explicit Turn(std::atomic<bool>& busy) : busy_(busy) {
    if (busy.exchange(true)) throw std::runtime_error("lines are made in another thread now");
  }
  ~Turn() { busy_.store(false); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& busy_;
};

}  // namespace

TraceLines::TraceLines(const nb::list& fields, bool samples, bool sketch, std::string rank, nb::object wide,
                       nb::object quoted, nb::object unusual)
    : rank_(std::move(rank)), wide_(std::move(wide)), quoted_(std::move(quoted)),
      unusual_(std::move(unusual)) {
  for (nb::handle one : fields) {
    const nb::tuple pair = nb::cast<nb::tuple>(one);
    const int place = nb::cast<int>(pair[1]);
    if (place < 0 || place >= kSample) throw nb::value_error("fields: expected places before the samples");
    chosen_.fields.emplace_back(nb::cast<std::string>(pair[0]), place);
  }
  chosen_.samples = samples;
  chosen_.sketch = sketch;
}

nb::bytes TraceLines::of(const nb::list& events, const nb::list& blocks) {
  const Turn turn(busy_);
  forget_now();
  read_blocks(blocks);
  texts_.clear();
  lines_.clear();
  for (nb::handle event : events) read(event.ptr());
  out_.clear();
  size_t done = 0;
  while (done < lines_.size()) {
    if (lines_.size() - done < kWorthReleasing) {
      done = write_until_unusual(done);
    } else {
      const Unlocked unlocked;
      done = write_until_unusual(done);
    }
    if (done < lines_.size()) write_unusual(lines_[done++]);
  }
  return nb::bytes(out_.data(), out_.size());
}

void TraceLines::forget_now() {
  if (std::exchange(forget_, false)) earlier_ = Earlier();
}

void TraceLines::line(std::string& out, const TracePlace& place, int64_t seq, int64_t same) {
  forget_now();
  append_begin(out, place, seq);
  out += "\"same\":";
  append_integer(out, earlier_.first(same));
  out += "}\n";
}

bool TraceLines::line(std::string& out, const TracePlace& place, int64_t seq, PyObject* shape, PyObject* of,
                      const double* row) {
  if (!usual(of, row)) return false;
  forget_now();
  const DType& type = dtype(of);
  shape_.clear();
  append_shape(shape_, shape);
  append_begin(out, place, seq);
  const int64_t same = earlier_.find(seq, shape_, type.name, row);
  if (same >= 0) {
    out += "\"same\":";
    append_integer(out, same);
  } else {
    append_rest(out, shape_, type, row);
  }
  out += "}\n";
  return true;
}

bool TraceLines::usual(PyObject* of, const double* row) {
  return !chosen_.any() || (!dtype(of).wide && is_plain(row));
}

void TraceLines::read_blocks(const nb::list& blocks) {
  blocks_.clear();
  for (nb::handle one : blocks) {
    const nb::tuple block = nb::cast<nb::tuple>(one);
    const auto address = static_cast<intptr_t>(nb::cast<int64_t>(block[trace_block::kAddress]));
    blocks_.push_back({block[trace_block::kRows].ptr(), reinterpret_cast<const double*>(address),
                       nb::cast<int64_t>(block[trace_block::kUsed])});
  }
}

void TraceLines::read(PyObject* event) {
  if (!PyTuple_Check(event) || PyTuple_GET_SIZE(event) != kPlaces) {
    throw nb::type_error("events: expected tuples as native_protocol.py says");
  }
  const auto at = [event](int place) { return PyTuple_GET_ITEM(event, place); };
  Line line;
  line.seq = integer(at(kSeq));
  line.begin = texts_.size();
  std::string where;
  append_where(where, at(kPhase), at(kPath));
  append_begin(texts_, {at(kHead), at(kCall), at(kStep), where}, line.seq);
  line.shape = texts_.size();
  if (at(kSame) != Py_None) {
    line.same = integer(at(kSame));
  } else {
    append_shape(texts_, at(kShape));
    line.dtype_object = at(kDtype);
    line.dtype = &dtype(line.dtype_object);
    line.row = at(kRows) == Py_None ? nullptr : row(at(kRows), integer(at(kSlot)));
  }
  line.end = texts_.size();
  if (at(kExtra) != Py_None) line.extra = text_of(at(kExtra));
  lines_.push_back(line);
}

void TraceLines::append_begin(std::string& out, const TracePlace& place, int64_t seq) {
  out += "{\"seq\":";
  append_integer(out, seq);
  (out += ',') += text_of(place.head);
  out += ",\"call\":";
  append_integer(out, integer(place.call));
  out += ",\"step\":";
  append_step(out, place.step);
  (((out += ',') += rank_) += place.where) += ',';
}

void TraceLines::append_step(std::string& out, PyObject* step) {
  if (step == Py_None) {
    out += "null";
    return;
  }
  const nb::str text = nb::str(nb::handle(step));  // an integer of any size
  out += text_of(text.ptr());
}

void TraceLines::append_shape(std::string& out, PyObject* shape) {
  if (!PyTuple_Check(shape)) throw nb::type_error("shape: expected a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
    if (i != 0) out += ',';
    append_integer(out, integer(PyTuple_GET_ITEM(shape, i)));
  }
}

// `"phase":"in","tensor":"args[0]"`
void TraceLines::append_where(std::string& out, PyObject* phase, PyObject* path) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(path, &size);
  if (data == nullptr) {  // half a character
    PyErr_Clear();
    out += made_where(phase, path);
    return;
  }
  thread_local std::string key;
  key.assign(text_of(phase)).append(1, '\n').append(data, static_cast<size_t>(size));
  const auto known = places_.find(key);
  if (known != places_.end()) {
    out += known->second;
    return;
  }
  std::string own = key, made = made_where(phase, path);
  out += made;
  if (places_.size() >= kPlacesKept) places_.clear();
  places_[std::move(own)] = std::move(made);
}

std::string TraceLines::made_where(PyObject* phase, PyObject* path) const {
  const nb::object quoted = quoted_(nb::handle(path));
  std::string made = "\"phase\":\"";
  made.append(text_of(phase)).append("\",\"tensor\":").append(text_of(quoted.ptr()));
  return made;
}

// The objects are torch's, one for each type, and never go away.
const TraceLines::DType& TraceLines::dtype(PyObject* object) {
  const auto known = dtypes_.find(object);
  if (known != dtypes_.end()) return known->second;
  std::string name = nb::cast<std::string>(nb::str(nb::handle(object)));
  if (name.starts_with("torch.")) name.erase(0, 6);
  const int wide = PySequence_Contains(wide_.ptr(), object);
  if (wide < 0) throw nb::python_error();
  return dtypes_[object] = DType{std::move(name), wide != 0};
}

const double* TraceLines::row(PyObject* rows, int64_t slot) const {
  for (const Block& block : blocks_) {
    if (block.rows != rows) continue;
    if (slot < 0 || slot >= block.used) throw nb::value_error("slot: expected one that is used");
    return block.first + slot * kFields;
  }
  throw nb::value_error("rows: expected one of the blocks");
}

// The lines from `i` on, up to one whose numbers Python writes; returns which that is.
size_t TraceLines::write_until_unusual(size_t i) {
  for (; i < lines_.size(); ++i) {
    Line& line = lines_[i];
    const std::string_view shape(texts_.data() + line.shape, line.end - line.shape);
    if (line.same >= 0) {
      line.same = earlier_.first(line.same);
    } else if (line.row != nullptr) {
      line.same = earlier_.find(line.seq, shape, line.dtype->name, line.row);
    }
    out_.append(texts_, line.begin, line.shape - line.begin);
    if (line.same >= 0) {
      out_ += "\"same\":";
      append_integer(out_, line.same);
    } else if (line.row != nullptr && chosen_.any() && (line.dtype->wide || !is_plain(line.row))) {
      ((out_ += "\"shape\":[") += shape) += "],";
      return i;
    } else {
      append_rest(out_, shape, *line.dtype, line.row);
    }
    end(line);
  }
  return i;
}

void TraceLines::append_rest(std::string& out, std::string_view shape, const DType& dtype,
                             const double* row) {
  ((out += "\"shape\":[") += shape) += "],";
  ((out += "\"dtype\":\"") += dtype.name) += '"';
  if (row != nullptr && chosen_.any()) append_statistics(out += ',', chosen_, row);
}

void TraceLines::write_unusual(const Line& line) {
  const nb::bytes row(reinterpret_cast<const char*>(line.row), kFields * sizeof(double));
  const nb::object text = unusual_(nb::handle(line.dtype_object), row);
  out_ += text_of(text.ptr());
  end(line);
}

void TraceLines::end(const Line& line) {
  if (!line.extra.empty()) (out_ += ',') += line.extra;
  out_ += "}\n";
}

void add_trace_lines(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<TraceLines>(m, "TraceLines", "Lines of a trace: see native/src/trace_lines.cpp.")
      .def(nb::init<const nb::list&, bool, bool, std::string, nb::object, nb::object, nb::object>(),
           "fields"_a, "samples"_a, "sketch"_a, "rank"_a, "wide"_a, "quoted"_a, "unusual"_a)
      .def("of", &TraceLines::of, "events"_a, "blocks"_a, "The lines of the events, as bytes.")
      .def("forget", &TraceLines::forget, "Refer to no earlier line from now on.");
}

}  // namespace polyattn
