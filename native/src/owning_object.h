// What Python types that own one C++ object share: how the collector looks into it, and its end.
#pragma once

#include <nanobind/nanobind.h>

namespace polyattn {

// Of an Object with a member `owned`, nullptr where it could not be made, whose class has traverse().
// Such types need no tp_clear: like a tuple they never change, so a cycle has another place to be cut.
template <class Object>
int traverse_owned(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  auto* const owned = reinterpret_cast<Object*>(self)->owned;
  return owned == nullptr ? 0 : owned->traverse(visit, arg);
}

template <class Object>
void destroy_owned(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->owned;
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace polyattn
