// What the Python types that stand for a prepared call share: an object that is called with q, k, v, mask, bias and
// sinks, made of a tuple of parts, and of a class with a member `parts`.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "owning_object.h"

namespace polyattn {

template <class Owned>
struct CallObject {
  PyObject_HEAD
  vectorcallfunc call;
  Owned* owned;
};

template <class Owned>
Owned& owned_by(PyObject* self) {
  return *reinterpret_cast<CallObject<Owned>*>(self)->owned;
}

// A new object that owns Owned(parts, of...) and is called by `call`; nullptr: a Python error is set.
template <class Owned, class... Of>
PyObject* made_call(PyTypeObject* type, vectorcallfunc call, PyObject* parts, Of&&... of) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* const object = reinterpret_cast<CallObject<Owned>*>(self);
  object->call = call;
  try {
    object->owned = new Owned(parts, std::forward<Of>(of)...);
    return self;
  } catch (nanobind::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
  Py_DECREF(self);
  return nullptr;
}

// The tuple that such a type is called with, borrowed; nullptr: a Python error is set. `known`: whether that is what
// it is made of.
template <class Known>
PyObject* parts_given(PyObject* arguments, PyObject* keywords, const Known& known) {
  PyObject* parts = nullptr;
  static const char* const kKeywords[] = {"parts", nullptr};
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!", const_cast<char**>(kKeywords), &PyTuple_Type,
                                   &parts)) {
    return nullptr;
  }
  if (known(parts)) return parts;
  PyErr_SetString(PyExc_ValueError, "got parts of another version of polyattn");
  return nullptr;
}

// Adds the type to the module; `name`: with the module's.
template <class Owned>
void add_call_type(nanobind::module_& m, const char* name, const char* doc, newfunc create,
                   PyMethodDef* methods) {
  using Object = CallObject<Owned>;
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Object, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>(doc)},
                         {Py_tp_new, reinterpret_cast<void*>(create)},
                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_traverse, reinterpret_cast<void*>(traverse_owned<Object>)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(destroy_owned<Object>)},
                         {Py_tp_members, members},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  PyType_Spec spec = {name, sizeof(Object), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nanobind::python_error();
  m.attr(std::strrchr(name, '.') + 1) = nanobind::steal(type);
}

}  // namespace polyattn
