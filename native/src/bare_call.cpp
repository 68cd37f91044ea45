// The Python class polyattn._native.BareCall: a call of the forward kernel in eager code, from plain tensors
// to their output. The function in polyattn/backends/native_cpu/torch/bare_kernel.py says the same in Python,
// and is the definition: there a call whose surroundings have left the processor's caches takes 18 us to come
// here, and the kernel of a short one 10.
//
// Whatever is not plain, or cannot be read, it hands to `careful`, which knows or says what is wrong.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <exception>
#include <new>
#include <utility>

#include "call_object.h"
#include "call_parts.h"
#include "door_surroundings.h"
#include "exchange.h"
#include "module_parts.h"
#include "plain_call.h"

namespace polyattn {
namespace {

// What Python hands over, in this order.
enum BarePart : int {
  kCareful,   // what takes every other call
  kExchange,  // how a tensor's memory is read
  kTypes,     // from here on: see PlainCall
  kAskers,
  kTracing,
  kLevels,
  kIsLazy,
  kThreads,     // a function: how many threads there are
  kEmptyLike,   // torch's
  kReadMask,    // a function that gives (terms, what is to be held) of a mask, q and k; or None
  kReadArrays,  // ... and one that gives (mask, bias) as arrays of mask, bias, q, k and v; or None
  kLooks,       // whether that looks at what is added: it may be a mask
  kArePlain,    // a function of the first two arrays of what is held beside q, k and v
  kIsa,         // the place of the form that runs these rows while the variable says `kAsked`
  kIsaFor,      // ... and a function that gives it for whatever it says
  kEnviron,     // the dictionary of the environment
  kVariable,
  kAsked,
  kDtype,
  kRowsFirst,
  kAlike,  // whether the output has the queries' head dim
  kLast,   // its head dim
  kPaged,
  kScale,
  kSoftcap,
  kBareParts
};

constexpr int kOwn = 6, kAtMost = 7;  // q, k, v, mask, bias, sinks; and of codes or pages

// What the calls of one object bring as their mask.
struct Brought {
  nb::object mask;    // that every call is under; none: calls bring theirs
  nb::object wrap;    // of a plain array: the function that gives (mask, bias) of it; none: it is no array
  bool adds = false;  // whether that array is added to the scores, and does not say which are allowed
};

struct Bare {
  Bare(PyObject* given, Brought what)
      : parts(nb::borrow(given)), brought(std::move(what)), tensors(nb::handle(part(kExchange))),
        is_plain(part(kTypes), part(kAskers), part(kTracing), part(kLevels), part(kIsLazy)),
        threads(part(kThreads)), new_empty(nb::steal(PyUnicode_InternFromString("new_empty"))),
        is_neg(nb::steal(PyUnicode_InternFromString("is_neg"))), problem{int(number(kIsa)),
                                                                         0,
                                                                         int(number(kDtype)),
                                                                         part(kRowsFirst) == Py_True,
                                                                         PyFloat_AsDouble(part(kScale)),
                                                                         PyFloat_AsDouble(part(kSoftcap))},
        none_read(nb::steal(PyTuple_New(0))) {
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
  }

  PyObject* part(BarePart place) const { return PyTuple_GET_ITEM(parts.ptr(), place); }
  long number(BarePart place) const { return PyLong_AsLong(part(place)); }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(parts.ptr());
    Py_VISIT(brought.mask.ptr());
    Py_VISIT(brought.wrap.ptr());
    return 0;
  }

  nb::object parts;
  Brought brought;
  Exchange tensors;
  PlainCall is_plain;
  Function threads;
  nb::object new_empty, is_neg;
  OfProblem problem;
  nb::object none_read;  // the terms of no mask
};

// What a call is made of: q, k, v, mask, bias, sinks, and a tuple of what is held beside them: of keys as codes
// (key_scales, value_scales, block_size), and of keys in pages (block_table, lengths).
struct Given {
  PyObject* a[kAtMost] = {nullptr, nullptr, nullptr, Py_None, Py_None, Py_None, nullptr};
  int count = kOwn;
};

nb::object owned(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// Where the output is written: rows like the queries', as torch's own function gives them.
nb::object output(const Bare& call, PyObject* q) {
  if (call.part(kAlike) == Py_True && (!call.problem.rows_first || call.tensors.is_contiguous(q))) {
    nb::object like = owned(PyObject_CallOneArg(call.part(kEmptyLike), q));
    if (call.tensors.last_stride(like) == 1) return like;  // that of rows that overlap may be another
  }
  const nb::object shape = owned(PyObject_GetAttr(q, names().shape));
  if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != 4) {
    throw nb::value_error("q: expected a tensor of 4 dims");
  }
  const nb::object sizes = owned(PyTuple_New(4));
  for (int i = 0; i < 3; ++i) {
    PyTuple_SET_ITEM(sizes.ptr(), i, Py_NewRef(PyTuple_GET_ITEM(shape.ptr(), i)));
  }
  PyTuple_SET_ITEM(sizes.ptr(), 3, Py_NewRef(call.part(kLast)));
  PyObject* const arguments[] = {q, sizes.ptr()};
  return owned(PyObject_VectorcallMethod(call.new_empty.ptr(), arguments, 2, nullptr));
}

int integer(const nb::object& found) {
  const long number = PyLong_AsLong(found.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return int(number);
}

// The place of the form that runs the call: found before, while the variable says what it said then.
int form(const Bare& call) {
  PyObject* found = PyDict_GetItemWithError(call.part(kEnviron), call.part(kVariable));
  if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (found == nullptr) found = Py_None;
  return found == call.part(kAsked) ? call.problem.isa
                                    : integer(owned(PyObject_CallNoArgs(call.part(kIsaFor))));
}

// Two objects that a function gives.
nb::object pair(PyObject* made) {
  nb::object found = owned(made);
  if (!PyTuple_Check(found.ptr()) || PyTuple_GET_SIZE(found.ptr()) != 2) {
    throw nb::type_error("expected a tuple of two");
  }
  return found;
}

// Runs the kernel; what it cannot read is a Python error, or an exception that is Python's ValueError.
nb::object attended(const Bare& call, const Given& given) {
  PyObject* const* const a = given.a;
  const nb::object out = output(call, a[0]);
  OfProblem problem = call.problem;
  problem.isa = form(call);
  problem.threads = integer(owned(call.threads()));
  const nb::handle nothing = Py_None;
  OfCall of{a[0], a[1], a[2], out, call.none_read, nothing, nothing, nothing, nothing, nothing};
  nb::object terms, arrays;
  if (call.part(kReadMask) != Py_None) {
    PyObject* const asked[] = {a[3], a[0], a[1]};
    terms = pair(PyObject_Vectorcall(call.part(kReadMask), asked, 3, nullptr));
    of.terms = PyTuple_GET_ITEM(terms.ptr(), 0);
  }
  if (!call.brought.wrap.is_none()) {
    (call.brought.adds ? of.bias : of.mask) = a[3];
  } else if (call.part(kReadArrays) != Py_None) {
    PyObject* const asked[] = {a[3], a[4], a[0], a[1], a[2]};
    arrays = pair(PyObject_Vectorcall(call.part(kReadArrays), asked, 5, nullptr));
    of.mask = PyTuple_GET_ITEM(arrays.ptr(), 0);
    of.bias = PyTuple_GET_ITEM(arrays.ptr(), 1);
  }
  if (given.count > kOwn) (call.part(kPaged) == Py_True ? of.pages : of.quantised) = a[kOwn];
  attend_tensors(call.tensors, problem, of);
  return out;
}

// Whether an array that a call brings as its mask is a tensor whose memory holds what it counts as.
Outcome is_plain_array(const Bare& call, PyObject* array) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(array)) != PyTuple_GET_ITEM(call.part(kTypes), 0)) return kNo;
  const Outcome lazy = truth(PyObject_CallOneArg(call.part(kIsLazy), array));
  if (lazy != kNo) return lazy == kError ? kError : kNo;
  if (!call.brought.adds) return kYes;
  const Outcome negated = truth(PyObject_VectorcallMethod(call.is_neg.ptr(), &array, 1, nullptr));
  return negated == kError ? kError : negated == kYes ? kNo : kYes;
}

Outcome is_plain(const Bare& call, const Given& given) {
  const Outcome plain = call.is_plain(given.a);
  if (plain == kYes && !call.brought.wrap.is_none()) return is_plain_array(call, given.a[3]);
  if (plain != kYes || given.count == kOwn) return plain;
  PyObject* const held = given.a[kOwn];
  if (!PyTuple_Check(held) || PyTuple_GET_SIZE(held) < 2) return kNo;
  PyObject* const arrays[] = {PyTuple_GET_ITEM(held, 0), PyTuple_GET_ITEM(held, 1)};
  return truth(PyObject_Vectorcall(call.part(kArePlain), arrays, 2, nullptr));
}

PyObject* careful(const Bare& call, Given& given) {
  nb::object wrapped;
  if (!call.brought.wrap.is_none()) {
    wrapped = nb::steal(PyObject_CallOneArg(call.brought.wrap.ptr(), given.a[3]));
    if (!wrapped.is_valid()) return nullptr;
    if (!PyTuple_Check(wrapped.ptr()) || PyTuple_GET_SIZE(wrapped.ptr()) != 2) {
      return PyErr_Format(PyExc_TypeError, "got %R, expected a mask and a bias", wrapped.ptr());
    }
    given.a[3] = PyTuple_GET_ITEM(wrapped.ptr(), 0);
    given.a[4] = PyTuple_GET_ITEM(wrapped.ptr(), 1);
  }
  return PyObject_Vectorcall(call.part(kCareful), given.a, size_t(given.count), nullptr);
}

PyObject* run(PyObject* self, Objects arguments, size_t flags, PyObject* keywords) {
  const Bare& call = owned_by<Bare>(self);
  const nb::object kept = nb::borrow(self);  // what is called may empty the table that holds it
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count < 3 || count > kAtMost || (keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0)) {
    return PyErr_Format(PyExc_TypeError, "got %zd arguments, expected q, k, v, mask, bias, sinks", count);
  }
  Given given;
  for (Py_ssize_t i = 0; i < count; ++i) given.a[i] = arguments[i];
  if (count == kAtMost) given.count = kAtMost;
  if (!call.brought.mask.is_none()) given.a[3] = call.brought.mask.ptr();
  const Outcome plain = is_plain(call, given);
  if (plain == kError) return nullptr;
  try {
    if (plain == kYes) return attended(call, given).release().ptr();
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_ValueError) && !error.matches(PyExc_BufferError) &&
        !error.matches(PyExc_RuntimeError)) {
      error.restore();
      return nullptr;
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const nb::builtin_exception& error) {
    if (error.type() == nb::exception_type::type_error) {
      PyErr_SetString(PyExc_TypeError, error.what());
      return nullptr;
    }
  } catch (const std::exception&) {  // sizes that no vector can have, say
    return careful(call, given);
  }
  return careful(call, given);
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  const auto known = [](PyObject* parts) {
    PyObject* const* const part = reinterpret_cast<PyTupleObject*>(parts)->ob_item;
    return PyTuple_GET_SIZE(parts) == kBareParts && PlainCall::is_known(part[kTypes], part[kAskers]) &&
           PyDict_Check(part[kEnviron]);
  };
  PyObject* const parts = parts_given(arguments, keywords, known);
  return parts == nullptr ? nullptr : made_call<Bare>(type, run, parts, Brought{none(), none()});
}

// The same call, under a mask of the caller's.
PyObject* bound_to(PyObject* self, PyObject* mask) {
  return made_call<Bare>(Py_TYPE(self), run, owned_by<Bare>(self).parts.ptr(),
                         Brought{nb::borrow(mask), none()});
}

// The same call, of which the mask is an array: (wrap, adds). None where that array has to be looked at.
PyObject* on_arrays(PyObject* self, PyObject* arguments) {
  PyObject* wrap = nullptr;
  int adds = 0;
  if (!PyArg_ParseTuple(arguments, "Op:on_arrays", &wrap, &adds)) return nullptr;
  if (adds != 0 && owned_by<Bare>(self).part(kLooks) == Py_True) Py_RETURN_NONE;
  return made_call<Bare>(Py_TYPE(self), run, owned_by<Bare>(self).parts.ptr(),
                         Brought{none(), nb::borrow(wrap), adds != 0});
}

}  // namespace

void add_bare_call(nb::module_& m) {
  static PyMethodDef methods[] = {
      {"bound_to", bound_to, METH_O, "The same call under this mask, whatever mask it is given."},
      {"on_arrays", on_arrays, METH_VARARGS,
       "The same call, whose mask is an array: (wrap, adds); `wrap` gives (mask, bias) of it. None where "
       "the array has to be looked at."},
      {nullptr, nullptr, 0, nullptr}};
  add_call_type<Bare>(m, "polyattn._native.BareCall",
                      "A call of the forward kernel; see "
                      "polyattn/backends/native_cpu/torch/bare_kernel.py.",
                      create, methods);
}

}  // namespace polyattn
