// The short way of a call from Python to its kernel, as a class of polyattn._native.
#pragma once

#include <nanobind/nanobind.h>

namespace polyattn {

// Adds Door.
void add_door(nanobind::module_& m);

}  // namespace polyattn
