// The key of a call, made of its options and of what is in force around it. A part of door.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include "door_classes.h"
#include "door_surroundings.h"

namespace polyattn {

// The fields of polyattn.torch.cache.Key, whose equal is built here.
constexpr const char* kFields[] = {
    "layout",  "mask",   "scale",      "softcap",  "dropout_p", "return_lse", "deterministic",
    "backend", "around", "determined", "switches", "environ",   "bias",       "sinks",
    "layer",   "cast",   "pages",      "causal",   "gqa",       "door",       "noted"};
constexpr int kAround = 8;
constexpr int kFieldCount = sizeof(kFields) / sizeof(kFields[0]);

struct Key {
  PyObject* layout;
  PyObject* mask;  // its signature
  PyObject* scale;
  PyObject* softcap;
  PyObject* dropout_p;
  PyObject* return_lse;
  PyObject* deterministic;
  PyObject* backend;
  PyObject* bias;
  PyObject* sinks;
  PyObject* pages;
  PyObject* causal;
  PyObject* gqa;
  PyObject* door;
};

// What keys hold of the arrays of a call, and keys.
class Keys {
 public:
  explicit Keys(const Surroundings& here) : here_(here) {}

  int traverse(visitproc visit, void* arg) {
    Py_VISIT(mask_.ptr());
    return 0;
  }

  // What a choice rests on of an array that is no input.
  nb::object part_of(PyObject* array, Part function) {
    if (array == Py_None) return none();
    return nb::steal(PyObject_CallOneArg(here_[function], array));
  }

  // ... of an array whose shape does not count.
  nb::object facts_of(PyObject* array) {
    nb::object dtype = nb::steal(PyObject_GetAttr(array, names().dtype));
    if (!dtype.is_valid()) return dtype;
    nb::object device = nb::steal(PyObject_GetAttr(array, names().device));
    if (!device.is_valid()) return device;
    Outcome trains = truth(PyObject_GetAttr(array, names().requires_grad));
    if (trains == kYes) trains = here_.asked(kGradMode);
    if (trains == kError) return nb::object();
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(array));
    return nb::steal(PyTuple_Pack(4, dtype.ptr(), device.ptr(), trains == kYes ? Py_True : Py_False, type));
  }

  // ... of a bias or a mask, whose arrays may be as long as the keys.
  nb::object added_by(Part function, PyObject* what, Objects a, PyObject* layout) {
    if (what == Py_None) return none();
    return nb::steal(PyObject_CallFunctionObjArgs(here_[function], what, a[0], a[1], layout, nullptr));
  }

  // ... of the mask of torch's signature, or of one that a mask of the class `holder` holds.
  nb::object added_key(PyObject* array, Shapes& shapes, PyObject* holder = nullptr) {
    if (array == Py_None) return none();
    if (!shapes.read()) return nb::object();
    nb::object shape = pattern(array, shapes);
    if (!shape.is_valid()) return shape;
    nb::object facts = facts_of(array);
    if (!facts.is_valid()) return facts;
    PyObject* const of[] = {PyTuple_GET_ITEM(facts.ptr(), 0), PyTuple_GET_ITEM(facts.ptr(), 1),
                            PyTuple_GET_ITEM(facts.ptr(), 2), PyTuple_GET_ITEM(facts.ptr(), 3)};
    return nb::steal(holder == nullptr ? PyTuple_Pack(5, shape.ptr(), of[0], of[1], of[2], of[3])
                                       : PyTuple_Pack(6, holder, shape.ptr(), of[0], of[1], of[2], of[3]));
  }

  static bool is_layout(PyObject* layout, const char* name) {
    return PyUnicode_Check(layout) && PyUnicode_CompareWithASCIIString(layout, name) == 0;
  }

  // What a choice rests on of a mask: its signature, or what its array has of the sizes.
  nb::object mask_key(PyObject* mask, Objects a, PyObject* layout, Shapes& shapes) {
    if (mask == Py_None || mask == mask_.ptr()) return signature_of(mask);
    const bool dense = reinterpret_cast<PyObject*>(Py_TYPE(mask)) == here_[kDense];
    if (dense && (is_layout(layout, "BTNH") || is_layout(layout, "BNTH"))) {
      const nb::object array = nb::steal(PyObject_GetAttr(mask, names().mask));
      if (!array.is_valid()) return nb::object();
      PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
      if (type == here_[kTensor] && shapes.read()) {
        return added_key(array.ptr(), shapes, here_[kDense]);
      }
      if (PyErr_Occurred() != nullptr) return nb::object();
    }
    if (is_static(mask, 0)) return signature_of(mask);
    return added_by(kMaskKey, mask, a, layout);
  }

  // The signature of a mask, that of the last mask without arrays being kept: such a mask never
  // changes, and while it is kept no other can take its place.
  nb::object signature_of(PyObject* mask) {
    if (mask == Py_None) return none();
    if (mask == mask_.ptr()) return signature_;
    nb::object found = nb::steal(PyObject_GetAttr(mask, names().signature));
    if (found.is_valid() && is_static(mask, 0)) {
      const nb::object before = mask_;  // whose end may run other code: after both are set
      mask_ = nb::borrow(mask);
      signature_ = found;
    }
    return found;
  }

  // Whether a key holds the very objects of a call, or the same numbers: then it equals its key.
  static bool is_same(PyObject* key, PyObject* const* fields, const Around& around) {
    for (int i = 0; i < kFieldCount; ++i) {
      PyObject* const known = PyTuple_GET_ITEM(key, i);
      if (i == kAround) {
        if (around.is_nothing() != (known == Py_None)) return false;
        if (known == Py_None) continue;
        const nb::object* const parts[] = {&around.scope, &around.traced, &around.module};
        for (int j = 0; j < 3; ++j) {
          if (PyTuple_GET_ITEM(known, j) != parts[j]->ptr()) return false;
        }
      } else if (known != fields[i] && !is_equal(known, fields[i])) {
        return false;
      }
    }
    return true;
  }

  // Whether two fields are the same number, or say the same of an array: such a tuple is made anew for
  // each call.
  static bool is_equal(PyObject* known, PyObject* field) {
    if (PyFloat_CheckExact(known) && PyFloat_CheckExact(field)) {
      return PyFloat_AS_DOUBLE(known) == PyFloat_AS_DOUBLE(field);
    }
    if (!PyTuple_CheckExact(known) || !PyTuple_CheckExact(field)) return false;
    const int equal = PyObject_RichCompareBool(known, field, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
  }

  // Whether no option is of a type that admission refuses though it equals what it takes: True, 1.0.
  static bool is_of_its_types(const Key& of) {
    if (PyBool_Check(of.scale) || PyBool_Check(of.softcap) || PyBool_Check(of.dropout_p)) return false;
    return (of.causal == Py_None || PyBool_Check(of.causal)) && (of.gqa == Py_None || PyBool_Check(of.gqa));
  }

  // A tuple that equals the polyattn.torch.cache.Key of the call, and has its hash.
  static nb::object built(PyObject* const* fields, const Around& around) {
    nb::object key = nb::steal(PyTuple_New(kFieldCount));
    if (!key.is_valid()) return key;
    for (int i = 0; i < kFieldCount; ++i) PyTuple_SET_ITEM(key.ptr(), i, Py_NewRef(fields[i]));
    if (around.is_nothing()) return key;
    PyObject* const asked = PyTuple_Pack(3, around.scope.ptr(), around.traced.ptr(), around.module.ptr());
    if (asked == nullptr) return nb::object();
    Py_DECREF(Py_None);
    PyTuple_SET_ITEM(key.ptr(), kAround, asked);
    return key;
  }

 private:
  bool is_static(PyObject* mask, int depth) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(mask));
    if (is_one_of(type, here_[kStatic])) return true;
    if (depth > 4 || !is_one_of(type, here_[kJoined])) return false;
    const nb::object members = nb::steal(PyObject_GetAttr(mask, names().members));
    if (!members.is_valid()) PyErr_Clear();
    if (!members.is_valid() || !PyTuple_Check(members.ptr())) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(members.ptr()); ++i) {
      if (!is_static(PyTuple_GET_ITEM(members.ptr(), i), depth + 1)) return false;
    }
    return true;
  }

  static bool is_one_of(PyObject* type, PyObject* types) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
      if (type == PyTuple_GET_ITEM(types, i)) return true;
    }
    return false;
  }

  const Surroundings& here_;
  nb::object mask_, signature_;
};

}  // namespace polyattn
