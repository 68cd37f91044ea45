// Integers out of tuples, by the C API: a call crosses the binding in well below 1 us.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace polyattn {

// What Python shows as ValueError.
[[noreturn]] inline void refuse(const char* complaint) { throw nanobind::value_error(complaint); }

// Reads the integers of one tuple. Complaints name the argument and what it should hold.
class Reader {
 public:
  Reader(nanobind::handle tuple, const char* name, const char* expected, int count)
      : tuple_(tuple.ptr()), name_(name) {
    if (!PyTuple_Check(tuple_)) {
      PyErr_Format(PyExc_TypeError, "%s: got %R, expected a tuple %s", name, tuple_, expected);
      throw nanobind::python_error();
    }
    const Py_ssize_t size = NB_TUPLE_GET_SIZE(tuple_);
    if (size != count) {
      PyErr_Format(PyExc_ValueError, "%s: got a tuple of %zd, expected %s", name, size, expected);
      throw nanobind::python_error();
    }
  }

  int64_t integer() {
    const int64_t value = PyLong_AsLongLong(NB_TUPLE_GET_ITEM(tuple_, next_));
    if (value == -1 && PyErr_Occurred() != nullptr) fail("an integer of 64 bits");
    ++next_;
    return value;
  }

  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<intptr_t>(integer()));
  }

 private:
  [[noreturn]] void fail(const char* expected) const {
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s[%zd]: got %R, expected %s", name_, next_,
                 NB_TUPLE_GET_ITEM(tuple_, next_), expected);
    throw nanobind::python_error();
  }

  PyObject* tuple_;
  const char* name_;
  Py_ssize_t next_ = 0;
};

}  // namespace polyattn
