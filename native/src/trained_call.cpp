// The Python class polyattn._native.TrainedCall: a short call of torch's CPU kernel that trains, of q, k and v
// alone or under a causal mask, and what is asked before of the call and of what its tensors hold. The
// function in polyattn/backends/sdpa/torch/short_training.py says the same in Python, and is the definition.
//
// Whatever is not ordinary it hands to `careful`, and has called no kernel then.
#include <nanobind/nanobind.h>

#include <exception>
#include <utility>

#include "call_object.h"
#include "door_surroundings.h"
#include "exchange.h"
#include "module_parts.h"
#include "plain_call.h"

namespace polyattn {
namespace {

// What Python hands over, in this order.
enum TrainedPart : int {
  kKernel,    // torch's binding of its operator
  kCareful,   // what takes every other call
  kExchange,  // how a tensor's memory is read
  kTypes,     // the two types of plain tensors
  kAskers,    // from here on: see PlainCall
  kTracing,
  kLevels,
  kIsLazy,
  kTurned,  // whether heads come behind rows
  kCausal,
  kScale,  // a number, or None
  kTrainedParts
};

constexpr int kAtMost = 6;  // q, k, v, mask, bias, sinks

struct Trained {
  explicit Trained(PyObject* given, nb::object held)
      : parts(nb::borrow(given)), mask(std::move(held)), tensors(nb::handle(part(kExchange))),
        is_plain(part(kTypes), part(kAskers), part(kTracing), part(kLevels), part(kIsLazy)),
        one(nb::steal(PyLong_FromLong(1))), two(nb::steal(PyLong_FromLong(2))),
        zero(nb::steal(PyFloat_FromDouble(0.0))),
        transpose(nb::steal(PyUnicode_InternFromString("transpose"))),
        scale_name(nb::steal(Py_BuildValue("(s)", "scale"))) {}

  PyObject* part(TrainedPart place) const { return PyTuple_GET_ITEM(parts.ptr(), place); }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(parts.ptr());
    Py_VISIT(mask.ptr());
    return 0;
  }

  nb::object parts;
  nb::object mask;  // that every call is under; none: calls bring theirs
  Exchange tensors;
  PlainCall is_plain;
  nb::object one, two, zero, transpose, scale_name;
};

Outcome is_ordinary(const Trained& call, Objects a) {
  try {
    for (int i = 0; i < 3; ++i) {
      if (!call.tensors.is_ordinary(a[i])) return kNo;
    }
    return kYes;
  } catch (nb::python_error& error) {  // what cannot be read is for the careful way
    if (error.matches(PyExc_ValueError) || error.matches(PyExc_BufferError) ||
        error.matches(PyExc_RuntimeError)) {
      return kNo;
    }
    error.restore();
    return kError;
  } catch (const std::exception&) {
    return kNo;
  }
}

nb::object turned(const Trained& call, PyObject* x) {
  PyObject* const given[] = {x, call.one.ptr(), call.two.ptr()};
  return nb::steal(PyObject_VectorcallMethod(call.transpose.ptr(), given, 3, nullptr));
}

PyObject* run_kernel(const Trained& call, Objects a) {
  const bool turns = call.part(kTurned) == Py_True;
  nb::object heads_first[3];
  PyObject* given[6] = {a[0], a[1], a[2], call.zero.ptr(), call.part(kCausal), call.part(kScale)};
  for (int i = 0; turns && i < 3; ++i) {
    heads_first[i] = turned(call, a[i]);
    if (!heads_first[i].is_valid()) return nullptr;
    given[i] = heads_first[i].ptr();
  }
  PyObject* const names = call.part(kScale) == Py_None ? nullptr : call.scale_name.ptr();
  const nb::object several = nb::steal(PyObject_Vectorcall(call.part(kKernel), given, 5, names));
  if (!several.is_valid()) return nullptr;
  nb::object out = nb::steal(PySequence_GetItem(several.ptr(), 0));
  return (turns && out.is_valid() ? turned(call, out.ptr()) : out).release().ptr();
}

PyObject* run(PyObject* self, Objects arguments, size_t flags, PyObject* keywords) {
  const Trained& call = owned_by<Trained>(self);
  const nb::object held = nb::borrow(self);  // what is called may empty the table that holds it
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count < 3 || count > kAtMost || (keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0)) {
    return PyErr_Format(PyExc_TypeError, "got %zd arguments, expected q, k, v, mask, bias, sinks", count);
  }
  PyObject* a[kAtMost] = {nullptr, nullptr, nullptr, Py_None, Py_None, Py_None};
  for (Py_ssize_t i = 0; i < count; ++i) a[i] = arguments[i];
  if (!call.mask.is_none()) a[3] = call.mask.ptr();
  Outcome ordinary = call.is_plain(a);
  if (ordinary == kYes) ordinary = is_ordinary(call, a);
  if (ordinary == kError) return nullptr;
  return ordinary == kYes ? run_kernel(call, a)
                          : PyObject_Vectorcall(call.part(kCareful), a, kAtMost, nullptr);
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  const auto known = [](PyObject* parts) {
    PyObject* const* const part = reinterpret_cast<PyTupleObject*>(parts)->ob_item;
    return PyTuple_GET_SIZE(parts) == kTrainedParts && PlainCall::is_known(part[kTypes], part[kAskers]);
  };
  PyObject* const parts = parts_given(arguments, keywords, known);
  return parts == nullptr ? nullptr : made_call<Trained>(type, run, parts, none());
}

// The same call, under a mask of the caller's, for `careful`.
PyObject* bound_to(PyObject* self, PyObject* mask) {
  return made_call<Trained>(Py_TYPE(self), run, owned_by<Trained>(self).parts.ptr(), nb::borrow(mask));
}

}  // namespace

void add_trained_call(nb::module_& m) {
  static PyMethodDef methods[] = {
      {"bound_to", bound_to, METH_O, "The same call under this mask, whatever mask it is given."},
      {nullptr, nullptr, 0, nullptr}};
  add_call_type<Trained>(m, "polyattn._native.TrainedCall",
                         "A short call that trains; see "
                         "polyattn/backends/sdpa/torch/short_training.py.",
                         create, methods);
}

}  // namespace polyattn
