// Events of a trace in, lines of JSON out: the Python class polyattn._native.TraceLines.
//
// Lines are made in two ways: of batches, for the writing thread, whose work under the interpreter's
// lock the model waits for; so it reads the events under the lock, which is quick, and writes the
// numbers without. And of one tensor at once, for TraceRecord, all under the lock.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "statistics/earlier.h"
#include "statistics/lines.h"

namespace polyattn {

// What a line begins with: head of `head_of`, call, step, and what append_where() says. Borrowed.
struct TracePlace {
  PyObject *head, *call, *step;
  std::string_view where;
};

class TraceLines {
 public:
  // `fields`: names and places of the statistics; `wide`: dtypes whose numbers have 17 digits;
  // `quoted`: a text as JSON; `unusual`: the statistics of a row that is not written the plain way,
  // as text, from (dtype, the row's bytes).
  TraceLines(const nanobind::list& fields, bool samples, bool sketch, std::string rank, nanobind::object wide,
             nanobind::object quoted, nanobind::object unusual);

  // The lines of the events; `blocks`: (rows, address of the first, how many are used).
  nanobind::bytes of(const nanobind::list& events, const nanobind::list& blocks);

  // From now on no line refers to the numbers of an earlier one.
  void forget() { forget_ = true; }

  // Whether a thread makes lines of a batch now; then there is no line().
  bool busy() const { return busy_.load(); }

  // Appends what a line says of phase and path. Of new ones it calls Python, and other threads may then run: line(),
  // in which nobody else may, is given it.
  void append_where(std::string& out, PyObject* phase, PyObject* path);

  // Appends the line of a tensor whose numbers line `same` has.
  void line(std::string& out, const TracePlace& place, int64_t seq, int64_t same);

  // Appends the line of a tensor; false, and nothing is changed, if Python has to write it.
  bool line(std::string& out, const TracePlace& place, int64_t seq, PyObject* shape, PyObject* of,
            const double* row);

  // Whether line() can write such a row.
  bool usual(PyObject* of, const double* row);

 private:
  struct DType {
    std::string name;
    bool wide;  // has numbers that need 17 digits
  };
  struct Line {
    int64_t seq, same = -1;
    size_t begin, shape, end;  // in the text: the line's beginning, from `shape` on its shape
    const DType* dtype = nullptr;
    PyObject* dtype_object = nullptr;
    const double* row = nullptr;
    std::string_view extra;
  };
  // The rows of one buffer, by the object that the events name.
  struct Block {
    PyObject* rows;
    const double* first;
    int64_t used;
  };

  void read_blocks(const nanobind::list& blocks);
  void read(PyObject* event);
  void append_begin(std::string& out, const TracePlace& place, int64_t seq);
  static void append_step(std::string& out, PyObject* step);
  static void append_shape(std::string& out, PyObject* shape);
  std::string made_where(PyObject* phase, PyObject* path) const;
  const DType& dtype(PyObject* object);
  const double* row(PyObject* rows, int64_t slot) const;
  size_t write_until_unusual(size_t i);
  void write_unusual(const Line& line);
  void forget_now();
  void append_rest(std::string& out, std::string_view shape, const DType& dtype, const double* row);
  void end(const Line& line);

  static constexpr size_t kPlacesKept = 4096;

  Chosen chosen_;
  std::string rank_;
  nanobind::object wide_, quoted_, unusual_;
  std::vector<Block> blocks_;
  std::vector<Line> lines_;
  std::string texts_, out_, shape_;
  std::unordered_map<std::string, std::string> places_;
  std::unordered_map<PyObject*, DType> dtypes_;
  Earlier earlier_;
  bool forget_ = false;  // done where lines are made, by one thread at a time
  std::atomic<bool> busy_{false};
};

}  // namespace polyattn
