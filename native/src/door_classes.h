// The sizes of a call, as its short way compares them: with those of its class, and with the sizes
// of the arrays that are added to its scores. A part of door.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <utility>

#include "door_surroundings.h"

namespace polyattn {

// What says of which class sizes are: batch and lengths rounded up, which length is larger, heads and dims.
constexpr int kClassSizes = 8;
using ClassSizes = std::array<long long, kClassSizes>;

// The shapes of query and key, and of value once it is asked for. polyattn/torch/size_classes.py says what
// a class of sizes is.
class Shapes {
 public:
  // Of four dims, (B, T, N, H) where `rows_first`, or of torch's signature, which has others too.
  Shapes(Objects a, bool rows_first) : tensors_(a), row_(rows_first ? 1 : 2) {}

  // False: a Python error is set.
  bool read() {
    for (int i = 0; i < 2; ++i) {
      if (!shape_[i].is_valid() && !read(i)) return false;
    }
    return true;
  }

  // The sizes that an array in dim `dim` of `dims`, the last ones of (B, N, T, S), is whole with;
  // -1 where there is none.
  long long whole(Py_ssize_t dim, Py_ssize_t dims) const {
    const Py_ssize_t from_end = dims - dim, rank = count(0);
    if (from_end == 1) return size(1, rank == 4 ? row_ : count(1) - 2);
    if (rank == 4 && from_end == 2) return size(0, row_);
    if (rank == 4 && from_end == 3) return size(0, 3 - row_);
    return size(0, rank - from_end);
  }

  // Reads all three; kNo: these are no sizes of a class. kError: a Python error is set.
  Outcome read_all() {
    if (known_ != kUnknown) return static_cast<Outcome>(known_);
    if (!read() || (!shape_[2].is_valid() && !read(2))) return kError;
    const Outcome found = classify() ? kYes : kNo;
    known_ = found;
    return found;
  }

  // Of read_all(), where that gave kYes.
  const ClassSizes& sizes() const { return sizes_; }

  // The key under which the table has the entries of this class of sizes; none: there is no class.
  // nullptr: a Python error is set.
  nb::object class_key() {
    const Outcome found = read_all();
    if (found != kYes) return found == kError ? nb::object() : none();
    nb::object key = nb::steal(PyTuple_New(kClassSizes));
    for (int i = 0; key.is_valid() && i < kClassSizes; ++i) {
      PyObject* const part = PyLong_FromLongLong(sizes_[i]);
      if (part == nullptr) return nb::object();
      PyTuple_SET_ITEM(key.ptr(), i, part);
    }
    return key;
  }

  long long keys() const { return size(1, row_); }

 private:
  static constexpr long long kFewest = 17, kMostBatch = 1 << 15;
  static constexpr int kUnknown = 2;

  // Whether there is a class of these sizes; sets what says which.
  bool classify() {
    if (count(0) != 4 || count(1) != 4 || count(2) != 4) return false;
    const int row = row_, head = 3 - row;
    const long long b = size(0, 0), t = size(0, row), s = size(1, row);
    const bool fits = size(1, 0) == b && size(1, 3) == size(0, 3) && size(2, 0) == b && size(2, row) == s &&
                      size(2, head) == size(1, head);
    if (!fits || b < 1 || b > kMostBatch || t < 1 || s < kFewest) return false;
    const long long order = t < s ? -1 : t > s ? 1 : 0;
    sizes_ = {up(b), up(t), up(s), order, size(0, head), size(1, head), size(0, 3), size(2, 3)};
    return true;
  }

  bool read(int i) {
    nb::object shape = nb::steal(PyObject_GetAttr(tensors_[i], names().shape));
    if (!shape.is_valid()) return false;
    if (!PyTuple_Check(shape.ptr())) {
      PyErr_SetString(PyExc_TypeError, "got a shape that is no tuple");
      return false;
    }
    shape_[i] = std::move(shape);
    return true;
  }

  Py_ssize_t count(int i) const { return PyTuple_GET_SIZE(shape_[i].ptr()); }

  long long size(int i, Py_ssize_t dim) const {
    if (dim < 0 || dim >= count(i)) return -1;
    PyObject* const found = PyTuple_GET_ITEM(shape_[i].ptr(), dim);
    return PyLong_CheckExact(found) ? PyLong_AsLongLong(found) : -1;
  }

  static long long up(long long size) {
    long long power = 1;
    while (power < size) power *= 2;
    return power;
  }

  Objects tensors_;
  int row_, known_ = kUnknown;
  nb::object shape_[3];
  ClassSizes sizes_;
};

// An array's shape, where it is as whole as the scores -1; polyattn.torch.cache.pattern does the same.
inline nb::object pattern(PyObject* array, const Shapes& shapes) {
  const nb::object shape = nb::steal(PyObject_GetAttr(array, names().shape));
  if (!shape.is_valid()) return nb::object();
  if (!PyTuple_Check(shape.ptr())) {
    PyErr_SetString(PyExc_TypeError, "got a shape that is no tuple");
    return nb::object();
  }
  const Py_ssize_t dims = PyTuple_GET_SIZE(shape.ptr());
  nb::object found = nb::steal(PyTuple_New(dims));
  for (Py_ssize_t i = 0; found.is_valid() && i < dims; ++i) {
    PyObject* const size = PyTuple_GET_ITEM(shape.ptr(), i);
    const long long number = PyLong_AsLongLong(size);
    if (number == -1 && PyErr_Occurred() != nullptr) return nb::object();
    const bool whole = number != 1 && number >= 0 && number == shapes.whole(i, dims);
    PyObject* const part = whole ? PyLong_FromLong(-1) : Py_NewRef(size);
    if (part == nullptr) return nb::object();
    PyTuple_SET_ITEM(found.ptr(), i, part);
  }
  return found;
}

}  // namespace polyattn
