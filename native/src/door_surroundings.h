// What a call's short way asks of its surroundings: scopes, recorders, torch's switches, the
// environment. A part of door.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

namespace polyattn {

namespace nb = nanobind;

// What Python hands over, in this order; see polyattn/torch/short_way.py.
enum Part : int {
  kMissed,   // what is given where Python has to look
  kStrange,  // the errors that mean just that, while a call is looked up
  kTensor,   // the two types of tensors that the table holds
  kParameter,
  kNested,  // the descriptor of their attribute is_nested
  kRows,    // of the table: by key (check, run, plan, by_shapes, by_class)
  kPlain,   // of the table: by layout (check, run, operator, determined, environ, others)
  kLocal,
  kScope,  // context variables
  kRecording,
  kDetermined,  // functions of torch without arguments
  kFunctionModes,
  kGradMode,
  kFlash,  // from here on its switches
  kEfficient,
  kMath,
  kCudnn,
  kGrad,
  kForwardGrad,
  kInference,
  kGraphTask,
  kHooks,    // ... and one with an argument
  kEnviron,  // the dictionary of the environment, and the key of POLYATTN_BACKEND
  kBackend,
  kArrayKey,  // functions: of arrays, biases and masks, what a choice rests on
  kBiasKey,
  kMaskKey,
  kResized,    // ... and what gives the selection of a class the sizes of a call
  kDense,      // the class of masks that are one array
  kStatic,     // classes of masks without arrays
  kJoined,     // classes of masks with members
  kAttention,  // texts
  kSdpa,
  kPaged,
  kQuantized,
  kBnth,
  kParts
};

struct Names {
  PyObject* append = PyUnicode_InternFromString("append");
  PyObject* device = PyUnicode_InternFromString("device");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* mask = PyUnicode_InternFromString("mask");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* members = PyUnicode_InternFromString("members");
  PyObject* module = PyUnicode_InternFromString("module");
  PyObject* selection = PyUnicode_InternFromString("selection");
  PyObject* signature = PyUnicode_InternFromString("signature");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* traced = PyUnicode_InternFromString("traced");
};

inline const Names& names() {
  static const Names made;
  return made;
}

using Objects = PyObject* const*;

// kError: a Python error is set.
enum Outcome : int { kError = -1, kNo = 0, kYes = 1 };

inline Outcome outcome(int value) { return value < 0 ? kError : value == 0 ? kNo : kYes; }

inline Outcome truth(PyObject* owned) {
  if (owned == nullptr) return kError;
  const Outcome found = owned == Py_True ? kYes : owned == Py_False ? kNo : outcome(PyObject_IsTrue(owned));
  Py_DECREF(owned);
  return found;
}

inline nb::object none() { return nb::borrow(Py_None); }

// A function without arguments. Those of extensions are called with nothing in between.
class Function {
 public:
  Function() = default;
  explicit Function(PyObject* object) : object_(object) {
    if (PyCFunction_CheckExact(object) && PyCFunction_GET_FLAGS(object) == METH_NOARGS) {
      direct_ = PyCFunction_GET_FUNCTION(object);
      self_ = PyCFunction_GET_SELF(object);
    }
  }

  PyObject* operator()() const {
    return direct_ != nullptr ? direct_(self_, nullptr) : PyObject_CallNoArgs(object_);
  }

 private:
  PyObject* object_ = nullptr;
  PyCFunction direct_ = nullptr;
  PyObject* self_ = nullptr;
};

// What is in force around a call: three objects, or nothing; and who records it, if anybody.
struct Around {
  nb::object scope, traced, module, recorders;

  bool is_nothing() const { return !scope.is_valid(); }
};

class Surroundings {
 public:
  // `parts`: a tuple in the order of Part.
  explicit Surroundings(PyObject* parts) : owner_(nb::borrow(parts)) {
    for (int i = 0; i < kParts; ++i) part_[i] = PyTuple_GET_ITEM(parts, i);
    for (int i = kDetermined; i <= kGraphTask; ++i) function_[i] = Function(part_[i]);
    nested_ = reinterpret_cast<PyGetSetDescrObject*>(part_[kNested])->d_getset;
  }

  PyObject* owner() const { return owner_.ptr(); }
  PyObject* operator[](Part part) const { return part_[part]; }

  // Whether these are tensors that the table may hold, in no checkpointed region; sets `around`.
  Outcome is_taken(Objects a, Around& around) const {
    for (int i = 0; i < 3; ++i) {
      PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(a[i]));
      if (type != part_[kTensor] && type != part_[kParameter]) return kNo;
      // the check of tensors would end the process with a nested one
      const Outcome nested = truth(nested_->get(a[i], nested_->closure));
      if (nested != kNo) return nested == kError ? kError : kNo;
    }
    if (!armed_) return kYes;
    const Outcome watched = is_watched();
    if (watched != kNo) return watched == kError ? kError : kNo;
    return look_for_recorders(around) ? look_around(around) : kError;
  }

  void arm(bool armed) { armed_ = armed; }

  // Whether a function says so, or counts any.
  Outcome asked(Part function) const { return truth(function_[function]()); }

  bool read_switches(bool (&on)[4]) const {
    for (int i = 0; i < 4; ++i) {
      const Outcome found = asked(static_cast<Part>(kFlash + i));
      if (found == kError) return false;
      on[i] = found == kYes;
    }
    return true;
  }

  // None where all are on.
  nb::object switches_key() const {
    bool on[4];
    if (!read_switches(on)) return nb::object();
    if (on[0] && on[1] && on[2] && on[3]) return none();
    const auto flag = [&](int i) { return on[i] ? Py_True : Py_False; };
    return nb::steal(PyTuple_Pack(4, flag(0), flag(1), flag(2), flag(3)));
  }

  // POLYATTN_BACKEND as the environment holds it, borrowed; nullptr: an error is set.
  PyObject* environment() const {
    PyObject* const found = PyDict_GetItemWithError(part_[kEnviron], part_[kBackend]);
    return found != nullptr || PyErr_Occurred() != nullptr ? found : Py_None;
  }

 private:
  Outcome look_around(Around& around) const {
    PyObject* value = nullptr;
    if (PyContextVar_Get(part_[kScope], nullptr, &value) < 0) return kError;
    nb::object scope = nb::steal(value);
    const Outcome scoped = value == nullptr ? kNo : outcome(PyObject_IsTrue(value));
    if (scoped == kError) return kError;
    if (scoped == kNo) scope = none();
    nb::object traced = nb::steal(PyObject_GetAttr(part_[kLocal], names().traced));
    if (!traced.is_valid()) return kError;
    nb::object module = nb::steal(PyObject_GetAttr(part_[kLocal], names().module));
    if (!module.is_valid()) return kError;
    if (scope.is_none() && traced.is_none() && module.is_none()) return kYes;
    around.scope = std::move(scope);
    around.traced = std::move(traced);
    around.module = std::move(module);
    return kYes;
  }

  bool look_for_recorders(Around& around) const {
    PyObject* value = nullptr;
    if (PyContextVar_Get(part_[kRecording], nullptr, &value) < 0) return false;
    const nb::object found = nb::steal(value);
    if (value != nullptr && PyTuple_Check(value) && PyTuple_GET_SIZE(value) > 0) {
      around.recorders = found;
    }
    return true;
  }

  // Whether a checkpointed region wants to know of this call; see recompute.py.
  Outcome is_watched() const {
    const Outcome grad = asked(kGrad);
    if (grad == kError) return kError;
    if (grad == kNo) {
      if (const Outcome forward = asked(kForwardGrad); forward != kNo) {
        return forward == kError ? kError : kNo;
      }
      const Outcome inference = asked(kInference);
      return inference == kError ? kError : inference == kYes ? kNo : kYes;
    }
    const nb::object task = nb::steal(function_[kGraphTask]());
    if (!task.is_valid()) return kError;
    const long number = PyLong_AsLong(task.ptr());
    if (number != -1) return kYes;
    if (PyErr_Occurred() != nullptr) return kError;
    const nb::object hooks = nb::steal(PyObject_CallOneArg(part_[kHooks], Py_False));
    return !hooks.is_valid() ? kError : hooks.is_none() ? kNo : kYes;
  }

  bool armed_ = true;  // polyattn.selection.scopes says when it changes
  nb::object owner_;   // of what part_ points to
  PyObject* part_[kParts];
  Function function_[kParts];
  PyGetSetDef* nested_;
};

}  // namespace polyattn
