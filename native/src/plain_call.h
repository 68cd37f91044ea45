// Whether a call is one of eager code with plain tensors, of which nobody else wants to know, as
// polyattn/torch/kit/plain_calls.py says it. A part of the calls that the extension makes by itself.
#pragma once

#include <nanobind/nanobind.h>

#include "door_surroundings.h"

namespace polyattn {

class PlainCall {
 public:
  static constexpr int kMostAskers = 8;

  // Whether these are what PlainCall is made of.
  static bool is_known(PyObject* types, PyObject* askers) {
    return PyTuple_Check(types) && PyTuple_GET_SIZE(types) == 2 && PyTuple_Check(askers) &&
           PyTuple_GET_SIZE(askers) <= kMostAskers;
  }

  // All are borrowed. `types`: the two types of plain tensors. `askers`: functions without arguments that
  // say whether somebody wants to know of the call; `tracing`: one that gives None where nobody traces.
  // `levels`: the module that has the level of forward mode. `is_lazy`: of a tensor, whether it is to be
  // copied on write.
  PlainCall(PyObject* types, PyObject* askers, PyObject* tracing, PyObject* levels, PyObject* is_lazy)
      : types_(types), levels_(levels), is_lazy_(is_lazy), tracing_(tracing),
        level_(nb::steal(PyUnicode_InternFromString("_current_level"))) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(askers); ++i) {
      askers_[asked_++] = Function(PyTuple_GET_ITEM(askers, i));
    }
  }

  // Of three tensors.
  Outcome operator()(Objects a) const {
    for (int i = 0; i < 3; ++i) {
      PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(a[i]));
      if (type != PyTuple_GET_ITEM(types_, 0) && type != PyTuple_GET_ITEM(types_, 1)) return kNo;
    }
    for (int i = 0; i < asked_; ++i) {
      if (const Outcome watched = truth(askers_[i]()); watched != kNo) {
        return watched == kError ? kError : kNo;
      }
    }
    const nb::object tracing = nb::steal(tracing_());
    if (!tracing.is_valid()) return kError;
    if (!tracing.is_none()) return kNo;
    const nb::object level = nb::steal(PyObject_GetAttr(levels_, level_.ptr()));
    if (!level.is_valid()) return kError;
    const long number = PyLong_AsLong(level.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) return kError;
    if (number >= 0) return kNo;
    for (int i = 0; i < 3; ++i) {
      if (const Outcome lazy = truth(PyObject_CallOneArg(is_lazy_, a[i])); lazy != kNo) {
        return lazy == kError ? kError : kNo;
      }
    }
    return kYes;
  }

 private:
  PyObject *types_, *levels_, *is_lazy_;
  Function askers_[kMostAskers], tracing_;
  int asked_ = 0;
  nb::object level_;
};

}  // namespace polyattn
