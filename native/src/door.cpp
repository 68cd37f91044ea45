// The Python class polyattn._native.Door: the short way of a call, from its arguments to the kernel
// that an earlier call of its class has prepared. polyattn/torch/short_way.py does the same in Python
// and is the definition; here only functions of the interpreter are used, nothing of torch's.
//
// Whatever it cannot tell it leaves to Python: it gives `missed`, and has called no kernel then.
// What a kernel raises it hands on. Objects that run other code, or that the table holds, are owned
// while they are used: the table may be emptied meanwhile.
#include <nanobind/nanobind.h>

#include <new>

#include "door.h"
#include "door_calls.h"
#include "owning_object.h"

namespace polyattn {
namespace {

struct DoorObject {
  PyObject_HEAD
  Door* owned;
};

// Calls one of Door's ways in with `count` arguments.
template <PyObject* (Door::*way)(Objects), int count>
PyObject* call(PyObject* self, Objects arguments, Py_ssize_t given) {
  if (given != count) {
    return PyErr_Format(PyExc_TypeError, "got %zd arguments, expected %d", given, count);
  }
  return (reinterpret_cast<DoorObject*>(self)->owned->*way)(arguments);
}

PyObject* forget(PyObject* self, PyObject*) {
  reinterpret_cast<DoorObject*>(self)->owned->forget();
  Py_RETURN_NONE;
}

PyObject* arm(PyObject* self, PyObject* armed) {
  reinterpret_cast<DoorObject*>(self)->owned->arm(armed == Py_True);
  Py_RETURN_NONE;
}

template <PyObject* (Door::*way)(Objects), int count>
PyCFunction method() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<way, count>));
}

// Whether Key has the fields that keys are built of here, and the parts are what is called them.
bool is_known(PyObject* parts, PyObject* fields) {
  if (PyTuple_GET_SIZE(parts) != kParts || PyTuple_GET_SIZE(fields) != kFieldCount) return false;
  for (int i = 0; i < kFieldCount; ++i) {
    PyObject* const field = PyTuple_GET_ITEM(fields, i);
    if (!PyUnicode_Check(field) || PyUnicode_CompareWithASCIIString(field, kFields[i]) != 0) {
      return false;
    }
  }
  for (const Part dict : {kRows, kPlain, kEnviron}) {
    if (!PyDict_Check(PyTuple_GET_ITEM(parts, dict))) return false;
  }
  for (const Part tuple : {kStrange, kStatic, kJoined}) {
    if (!PyTuple_Check(PyTuple_GET_ITEM(parts, tuple))) return false;
  }
  PyObject *const tensor = PyTuple_GET_ITEM(parts, kTensor),
                  *const parameter = PyTuple_GET_ITEM(parts, kParameter),
                  *const nested = PyTuple_GET_ITEM(parts, kNested);
  if (!PyType_Check(tensor) || !PyType_Check(parameter) || Py_TYPE(nested) != &PyGetSetDescr_Type) {
    return false;
  }
  for (PyObject* const type : {tensor, parameter}) {  // whose members the descriptor reads
    if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), PyDescr_TYPE(nested))) return false;
  }
  return PyContextVar_CheckExact(PyTuple_GET_ITEM(parts, kScope)) &&
         PyContextVar_CheckExact(PyTuple_GET_ITEM(parts, kRecording));
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  PyObject *parts = nullptr, *fields = nullptr;
  static const char* const kKeywords[] = {"parts", "fields", nullptr};
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!:Door", const_cast<char**>(kKeywords),
                                   &PyTuple_Type, &parts, &PyTuple_Type, &fields)) {
    return nullptr;
  }
  if (!is_known(parts, fields)) {
    PyErr_SetString(PyExc_ValueError, "got parts or fields of another version of polyattn");
    return nullptr;
  }
  PyObject* const self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Door* const door = new (std::nothrow) Door(parts);
  reinterpret_cast<DoorObject*>(self)->owned = door;
  if (door != nullptr) return self;
  Py_DECREF(self);
  return PyErr_NoMemory();
}

}  // namespace

void add_door(nb::module_& m) {
  static PyMethodDef methods[] = {
      {"forget", forget, METH_NOARGS, "To be called when the table has changed."},
      {"arm", arm, METH_O, "Have calls look around for requests and recorders, or not."},
      {"attention", method<&Door::attention, 13>(), METH_FASTCALL,
       "Run a call of attention, or give missed."},
      {"sdpa", method<&Door::sdpa, 8>(), METH_FASTCALL, "Run a call with torch's signature, or give missed."},
      {"drop_in", method<&Door::drop_in, 8>(), METH_FASTCALL,
       "As sdpa, but miss a call under a function mode."},
      {"heard", method<&Door::heard, 9>(), METH_FASTCALL,
       "As drop_in, but give (selection, output); the ninth: the type of recorders that are not told."},
      {"paged", method<&Door::paged, 12>(), METH_FASTCALL, "Run a call on pages, or give missed."},
      {"quantized", method<&Door::quantized, 14>(), METH_FASTCALL,
       "Run a call on quantised keys, or give missed."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("The short way of a call; see polyattn/torch/short_way.py.")},
      {Py_tp_new, reinterpret_cast<void*>(create)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_owned<DoorObject>)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy_owned<DoorObject>)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec = {"polyattn._native.Door", sizeof(DoorObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nb::python_error();
  m.attr("Door") = nb::steal(type);
}

}  // namespace polyattn
