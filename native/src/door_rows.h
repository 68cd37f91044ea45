// How a row of the table is searched for what serves a call, and what ran lately is tried first. A
// part of door.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>

#include "door_classes.h"
#include "door_surroundings.h"

namespace polyattn {

struct Found {
  nb::object tensors;  // q, k and v as a tuple
  nb::object run;
  nb::object plan;           // where somebody records the call
  bool is_operator = false;  // called with three tensors, and gives the output first of several
};

inline bool pack(Objects a, Found& found) {
  if (!found.tensors.is_valid()) found.tensors = nb::steal(PyTuple_Pack(3, a[0], a[1], a[2]));
  return found.tensors.is_valid();
}

// Whether an entry's check, which comes first in it, takes the call's tensors.
inline Outcome check(PyObject* entry, Objects a, Found& found) {
  PyObject* const function = PyTuple_GET_ITEM(entry, 0);
  if (!PyCFunction_CheckExact(function) || PyCFunction_GET_FLAGS(function) != METH_VARARGS) {
    return truth(PyObject_Vectorcall(function, a, 3, nullptr));
  }
  if (!pack(a, found)) return kError;
  return truth(PyCFunction_GET_FUNCTION(function)(PyCFunction_GET_SELF(function), found.tensors.ptr()));
}

// Takes an entry or a row, (check, run, plan, ...), if its check holds.
inline Outcome take(PyObject* entry, Objects a, Found& found) {
  const Outcome same = check(entry, a, found);
  if (same != kYes) return same;
  found.run = nb::borrow(PyTuple_GET_ITEM(entry, 1));
  found.plan = nb::borrow(PyTuple_GET_ITEM(entry, 2));
  return kYes;
}

// What ran lately under one key: found with no object made, where a row is searched by tuples of
// sizes. A program's calls of one key often take turns, say those on its text and on what it heard, and
// between two of them its own work empties the caches: what is touched is what counts.
class Ran {
 public:
  // Takes the entry that serves a call, if it is here; `exact`: whether it is one of these very sizes.
  Outcome find(Objects a, Shapes& shapes, Found& found, bool& exact) const {
    for (int i = 0; i < count_; ++i) {
      const nb::object entry = entry_[i];  // owned here: a check may run other code
      if (i >= exact_) {
        const Outcome read = shapes.read_all();
        if (read == kError) return kError;
        if (read == kNo || !(shapes.sizes() == class_[i])) continue;
        if (shapes.keys() < low_[i] || shapes.keys() > high_[i]) continue;
      }
      exact = i < exact_;
      if (const Outcome same = take(entry.ptr(), a, found); same != kNo) return same;
    }
    return kNo;
  }

  // Notes an entry that has served a call; gives what it has displaced, whose end may run other code.
  // Entries of very sizes come first, as they do in a row.
  nb::object add(nb::object entry, bool exact, Shapes& shapes) {
    const int place = exact ? 0 : exact_ < kMost ? exact_ : kMost - 1;
    if (exact_ == kMost && !exact) --exact_;
    const nb::object displaced = count_ < kMost ? nb::object() : entry_[kMost - 1];
    if (count_ < kMost) ++count_;
    for (int i = count_ - 1; i > place; --i) {
      entry_[i] = std::move(entry_[i - 1]);
      class_[i] = class_[i - 1];
      low_[i] = low_[i - 1];
      high_[i] = high_[i - 1];
    }
    if (exact) {
      exact_ = exact_ < kMost ? exact_ + 1 : kMost;
    } else {
      class_[place] = shapes.sizes();
      low_[place] = PyLong_AsLongLong(PyTuple_GET_ITEM(entry.ptr(), 3));
      high_[place] = PyLong_AsLongLong(PyTuple_GET_ITEM(entry.ptr(), 4));
    }
    entry_[place] = std::move(entry);
    return displaced;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const nb::object& entry : entry_) Py_VISIT(entry.ptr());
    return 0;
  }

 private:
  static constexpr int kMost = 4;

  int count_ = 0, exact_ = 0;  // of these the first ones serve their very sizes, the others a class
  nb::object entry_[kMost];
  ClassSizes class_[kMost];
  long long low_[kMost], high_[kMost];
};

// A key that the table has, its row, and what ran of it.
struct Recent {
  nb::object key, row;
  Ran ran;
};

inline Outcome find_by_shapes(PyObject* by_shapes, Objects a, Found& found, nb::object& entry) {
  if (!PyDict_Check(by_shapes)) return kNo;
  const nb::object shapes = nb::steal(PyTuple_New(3));
  if (!shapes.is_valid()) return kError;
  for (int i = 0; i < 3; ++i) {
    PyObject* const shape = PyObject_GetAttr(a[i], names().shape);
    if (shape == nullptr) return kError;
    PyTuple_SET_ITEM(shapes.ptr(), i, shape);
  }
  PyObject* const known = PyDict_GetItemWithError(by_shapes, shapes.ptr());
  if (known == nullptr) return PyErr_Occurred() != nullptr ? kError : kNo;
  const nb::object alike = nb::borrow(known);
  for (Py_ssize_t i = 0; PyTuple_Check(known) && i < PyTuple_GET_SIZE(known); ++i) {
    entry = nb::borrow(PyTuple_GET_ITEM(known, i));
    if (!PyTuple_Check(entry.ptr()) || PyTuple_GET_SIZE(entry.ptr()) < 3) return kNo;
    if (const Outcome same = take(entry.ptr(), a, found); same != kNo) return same;
  }
  return kNo;
}

inline Outcome find_by_class(PyObject* by_class, Objects a, Shapes& shapes, Found& found, nb::object& entry) {
  if (!PyDict_Check(by_class) || PyDict_GET_SIZE(by_class) == 0) return kNo;
  const nb::object key = shapes.class_key();
  if (!key.is_valid()) return kError;
  PyObject* const known = key.is_none() ? nullptr : PyDict_GetItemWithError(by_class, key.ptr());
  if (known == nullptr) return PyErr_Occurred() != nullptr ? kError : kNo;
  const nb::object alike = nb::borrow(known);
  for (Py_ssize_t i = 0; PyTuple_Check(known) && i < PyTuple_GET_SIZE(known); ++i) {
    entry = nb::borrow(PyTuple_GET_ITEM(known, i));  // (check, run, plan, low, high)
    if (!PyTuple_Check(entry.ptr()) || PyTuple_GET_SIZE(entry.ptr()) != 5) return kNo;
    const long long low = PyLong_AsLongLong(PyTuple_GET_ITEM(entry.ptr(), 3)),
                    high = PyLong_AsLongLong(PyTuple_GET_ITEM(entry.ptr(), 4));
    if (PyErr_Occurred() != nullptr) return kError;
    if (shapes.keys() < low || shapes.keys() > high) continue;
    if (const Outcome same = take(entry.ptr(), a, found); same != kNo) return same;
  }
  return kNo;
}

// Takes what serves a call in the row of its key: the newest entry, one of its very sizes, or one of
// their class.
inline Outcome find_in_row(PyObject* row, Objects a, Shapes& shapes, Found& found, nb::object& entry,
                           bool& exact) {
  exact = true;
  entry = nb::borrow(row);
  if (const Outcome newest = take(row, a, found); newest != kNo) return newest;
  const Outcome same = find_by_shapes(PyTuple_GET_ITEM(row, 3), a, found, entry);
  if (same != kNo) return same;
  exact = false;
  return find_by_class(PyTuple_GET_ITEM(row, 4), a, shapes, found, entry);
}

}  // namespace polyattn
