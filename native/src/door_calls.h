// The class behind polyattn._native.Door: looks calls up and runs them. A part of door.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>

#include "door_classes.h"
#include "door_keys.h"
#include "door_rows.h"
#include "door_surroundings.h"

namespace polyattn {

class Door {
 public:
  explicit Door(PyObject* parts) : here_(parts), keys_(here_) {}

  PyObject* attention(Objects a) {
    Found found;
    const Outcome outcome = find_attention(a, found);
    if (outcome != kYes) return left(outcome);
    if (found.is_operator) {
      return first_of(PyObject_Call(found.run.ptr(), found.tensors.ptr(), nullptr));
    }
    PyObject* const call[] = {a[0], a[1], a[2], a[3], a[4], a[7]};
    return PyObject_Vectorcall(found.run.ptr(), call, 6, nullptr);
  }

  PyObject* sdpa(Objects a) {
    Found found;
    const Outcome outcome = find_sdpa(a, found);
    if (outcome != kYes) return left(outcome);
    return PyObject_Vectorcall(found.run.ptr(), a, 4, nullptr);
  }

  // As sdpa, but where a function mode is in force: that may want to see the call.
  PyObject* drop_in(Objects a) {
    const Outcome modes = here_.asked(kFunctionModes);
    return modes == kNo ? sdpa(a) : left(modes == kYes ? kNo : kError);
  }

  // As drop_in, and who listens is told what ran: (selection, output), of a class that of the class. Missed too
  // where somebody records the call, but for recorders of the type a[8], which hear of compiled code alone.
  PyObject* heard(Objects a) {
    const Outcome modes = here_.asked(kFunctionModes);
    if (modes != kNo) return left(modes == kYes ? kNo : kError);
    Found found;
    const Outcome outcome = find_sdpa(a, found, reinterpret_cast<PyTypeObject*>(a[8]));
    if (outcome != kYes) return left(outcome);
    const nb::object selection = nb::steal(PyObject_GetAttr(found.plan.ptr(), names().selection));
    if (!selection.is_valid()) return nullptr;
    const nb::object out = nb::steal(PyObject_Vectorcall(found.run.ptr(), a, 4, nullptr));
    return out.is_valid() ? PyTuple_Pack(2, selection.ptr(), out.ptr()) : nullptr;
  }

  PyObject* paged(Objects a) {
    Found found;
    const Outcome outcome = find_paged(a, found);
    if (outcome != kYes) return left(outcome);
    PyObject* const call[] = {a[0], a[1], a[2], a[5], Py_None, a[8], a[3], a[4]};
    return PyObject_Vectorcall(found.run.ptr(), call, 8, nullptr);
  }

  PyObject* quantized(Objects a) {
    Found found;
    const Outcome outcome = find_quantized(a, found);
    if (outcome != kYes) return left(outcome);
    PyObject* const call[] = {a[0], a[1], a[2], a[6], a[7], a[10], a[3], a[4], a[5]};
    return PyObject_Vectorcall(found.run.ptr(), call, 9, nullptr);
  }

  // Whether calls have to look around for requests and recorders, from now on.
  void arm(bool armed) { here_.arm(armed); }

  // The table has changed.
  void forget() {
    for (Recent& recent : recent_) {
      const Recent before = std::exchange(recent, Recent());
    }
  }

  int traverse(visitproc visit, void* arg) {
    Py_VISIT(here_.owner());
    if (const int found = keys_.traverse(visit, arg); found != 0) return found;
    for (const Recent& recent : recent_) {
      Py_VISIT(recent.key.ptr());
      Py_VISIT(recent.row.ptr());
      if (const int found = recent.ran.traverse(visit, arg); found != 0) return found;
    }
    return 0;
  }

 private:
  // query, key, value, mask, bias, scale, softcap, sinks, dropout_p, layout, return_lse,
  // deterministic, backend
  Outcome find_attention(Objects a, Found& found) {
    Around around;
    if (const Outcome taken = here_.is_taken(a, around); taken != kYes) return taken;
    if (around.is_nothing() && !around.recorders.is_valid() && is_plainest(a)) {
      if (const Outcome plain = find_plain(a, found); plain != kNo) return plain;
    }
    Shapes shapes(a, Keys::is_layout(a[9], "BTNH"));
    const nb::object signature = keys_.mask_key(a[3], a, a[9], shapes);
    if (!signature.is_valid()) return kError;
    const nb::object bias = keys_.added_by(kBiasKey, a[4], a, a[9]);
    if (!bias.is_valid()) return kError;
    const nb::object sinks = keys_.part_of(a[7], kArrayKey);
    if (!sinks.is_valid()) return kError;
    return find({a[9], signature.ptr(), a[5], a[6], a[8], a[10], a[11], a[12], bias.ptr(), sinks.ptr(),
                 Py_None, Py_None, Py_None, here_[kAttention]},
                around, a, shapes, found);
  }

  // query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa. `deaf`: the type of recorders that are
  // not told; with others there is no such call.
  Outcome find_sdpa(Objects a, Found& found, PyTypeObject* deaf = nullptr) {
    Around around;
    if (const Outcome taken = here_.is_taken(a, around); taken != kYes) return taken;
    if (deaf != nullptr) {
      PyObject* const recorders = around.recorders.ptr();
      for (Py_ssize_t i = 0; recorders != nullptr && i < PyTuple_GET_SIZE(recorders); ++i) {
        if (Py_TYPE(PyTuple_GET_ITEM(recorders, i)) != deaf) return kNo;
      }
      around.recorders.reset();
    }
    Shapes shapes(a, false);
    const nb::object array = keys_.added_key(a[3], shapes);
    if (!array.is_valid()) return kError;
    return find({here_[kBnth], array.ptr(), a[6], Py_None, a[4], Py_False, Py_None, Py_None, Py_None, Py_None,
                 Py_None, a[5], a[7], here_[kSdpa]},
                around, a, shapes, found);
  }

  // query, key_pages, value_pages, block_table, lengths, mask, scale, softcap, sinks, layout,
  // return_lse, backend
  Outcome find_paged(Objects a, Found& found) {
    Around around;
    if (const Outcome taken = here_.is_taken(a, around); taken != kYes) return taken;
    Shapes shapes(a, false);
    const nb::object signature = keys_.signature_of(a[5]);
    if (!signature.is_valid()) return kError;
    const nb::object sinks = keys_.part_of(a[8], kArrayKey);
    if (!sinks.is_valid()) return kError;
    const nb::object table = keys_.part_of(a[3], kArrayKey);
    if (!table.is_valid()) return kError;
    const nb::object lengths = keys_.part_of(a[4], kArrayKey);
    if (!lengths.is_valid()) return kError;
    const nb::object pages = nb::steal(PyTuple_Pack(2, table.ptr(), lengths.ptr()));
    if (!pages.is_valid()) return kError;
    const nb::object zero = nb::steal(PyFloat_FromDouble(0.0));
    if (!zero.is_valid()) return kError;
    return find({a[9], signature.ptr(), a[6], a[7], zero.ptr(), a[10], Py_None, a[11], Py_None, sinks.ptr(),
                 pages.ptr(), Py_None, Py_None, here_[kPaged]},
                around, a, shapes, found);
  }

  // query, key_codes, value_codes, key_scales, value_scales, block_size, mask, bias, scale, softcap,
  // sinks, layout, return_lse, backend
  Outcome find_quantized(Objects a, Found& found) {
    Around around;
    if (const Outcome taken = here_.is_taken(a, around); taken != kYes) return taken;
    Shapes shapes(a, Keys::is_layout(a[11], "BTNH"));
    const nb::object signature = keys_.mask_key(a[6], a, a[11], shapes);
    if (!signature.is_valid()) return kError;
    const nb::object bias = keys_.added_by(kBiasKey, a[7], a, a[11]);
    if (!bias.is_valid()) return kError;
    const nb::object sinks = keys_.part_of(a[10], kArrayKey);
    if (!sinks.is_valid()) return kError;
    const nb::object keys = keys_.facts_of(a[3]);
    if (!keys.is_valid()) return kError;
    const nb::object values = keys_.facts_of(a[4]);
    if (!values.is_valid()) return kError;
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(a[5]));
    const nb::object codes = nb::steal(PyTuple_Pack(4, keys.ptr(), values.ptr(), type, a[5]));
    if (!codes.is_valid()) return kError;
    const nb::object zero = nb::steal(PyFloat_FromDouble(0.0));
    if (!zero.is_valid()) return kError;
    PyObject* const noted[] = {a[0], a[1], a[2], a[6], a[7]};  // as recorders read them
    return find({a[11], signature.ptr(), a[8], a[9], zero.ptr(), a[12], Py_None, a[13], bias.ptr(),
                 sinks.ptr(), codes.ptr(), Py_None, Py_None, here_[kQuantized]},
                around, noted, shapes, found);
  }

  // What is given where no kernel is called.
  PyObject* left(Outcome outcome) {
    if (outcome == kError) {
      if (!PyErr_ExceptionMatches(here_[kStrange])) return nullptr;
      PyErr_Clear();
    }
    return Py_NewRef(here_[kMissed]);
  }

  // Nothing but tensors and a layout: each option is what it is where it is not given.
  static bool is_plainest(Objects a) {
    return a[3] == Py_None && a[4] == Py_None && a[5] == Py_None && a[6] == Py_None && a[7] == Py_None &&
           a[11] == Py_None && a[12] == Py_None && a[10] == Py_False && PyFloat_CheckExact(a[8]) &&
           PyFloat_AS_DOUBLE(a[8]) == 0.0 && PyUnicode_CheckExact(a[9]);
  }

  Outcome find_plain(Objects a, Found& found) {
    PyObject* const known = PyDict_GetItemWithError(here_[kPlain], a[9]);
    if (known == nullptr) return PyErr_Occurred() != nullptr ? kError : kNo;
    const nb::object held = nb::borrow(known);
    if (!PyTuple_Check(known) || PyTuple_GET_SIZE(known) != 6) return kNo;
    const Outcome determined = here_.asked(kDetermined);
    if (determined == kError) return kError;
    if ((determined == kYes ? Py_True : Py_False) != PyTuple_GET_ITEM(known, 3)) return kNo;
    PyObject* const environ = here_.environment();
    if (environ == nullptr) return kError;
    if (environ != PyTuple_GET_ITEM(known, 4)) return kNo;
    bool on[4];
    if (!here_.read_switches(on)) return kError;
    if (!(on[0] && on[1] && on[2] && on[3])) return kNo;
    const Outcome same = choose(known, a, found);
    if (same != kNo) return same;
    PyObject* const others = PyTuple_GET_ITEM(known, 5);
    for (Py_ssize_t i = 0; PyTuple_Check(others) && i < PyTuple_GET_SIZE(others); ++i) {
      PyObject* const other = PyTuple_GET_ITEM(others, i);
      if (!PyTuple_Check(other) || PyTuple_GET_SIZE(other) < 3) return kNo;
      if (const Outcome same = choose(other, a, found); same != kNo) return same;
    }
    return kNo;
  }

  // Takes one of (check, run, operator, ...) if its check holds.
  static Outcome choose(PyObject* entry, Objects a, Found& found) {
    const Outcome same = check(entry, a, found);
    if (same != kYes) return same;
    found.is_operator = PyTuple_GET_ITEM(entry, 2) != Py_None;
    if (found.is_operator && !pack(a, found)) return kError;
    found.run = nb::borrow(PyTuple_GET_ITEM(entry, found.is_operator ? 2 : 1));
    return kYes;
  }

  Outcome find(const Key& of, const Around& around, Objects a, Shapes& shapes, Found& found) {
    const Outcome determined = here_.asked(kDetermined);
    const nb::object switches = determined == kError ? nb::object() : here_.switches_key();
    PyObject* const environ = switches.is_valid() ? here_.environment() : nullptr;
    if (environ == nullptr) return kError;
    PyObject* const fields[kFieldCount] = {
        of.layout,      of.mask,          of.scale,   of.softcap, of.dropout_p,
        of.return_lse,  of.deterministic, of.backend, Py_None,    determined == kYes ? Py_True : Py_False,
        switches.ptr(), environ,          of.bias,    of.sinks,   Py_None,
        Py_None,        of.pages,         of.causal,  of.gqa,     of.door,
        Py_None};
    Recent& recent = recent_[place_of(fields)];
    nb::object row = recent.row;  // owned here: what follows may change the table
    if (!row.is_valid() || !Keys::is_same(recent.key.ptr(), fields, around)) {
      if (!Keys::is_of_its_types(of)) return kNo;
      const nb::object key = Keys::built(fields, around);
      if (!key.is_valid()) return kError;
      PyObject* const known = PyDict_GetItemWithError(here_[kRows], key.ptr());
      if (known == nullptr) return PyErr_Occurred() != nullptr ? kError : kNo;
      row = nb::borrow(known);
      if (!PyTuple_Check(known) || PyTuple_GET_SIZE(known) != 5) return kNo;
      // whose end may run other code: after it is set
      const Recent before = std::exchange(recent, Recent{key, row, {}});
    }
    bool exact = true;
    Outcome outcome = recent.ran.find(a, shapes, found, exact);
    if (outcome == kNo) {
      nb::object entry;
      outcome = find_in_row(row.ptr(), a, shapes, found, entry, exact);
      // unless the table has changed meanwhile, and the row is not what it was
      if (outcome == kYes && recent.row.is(row)) {
        const nb::object before = recent.ran.add(std::move(entry), exact, shapes);
      }
    }
    if (outcome != kYes || !around.recorders.is_valid()) return outcome;
    const bool biased = of.door == here_[kAttention] || of.door == here_[kQuantized];
    return noted(around.recorders, found, exact ? nullptr : a, biased);
  }

  // Tells the recorders what was chosen; `a`: the arguments of a call that a class has served, of
  // which the selection is to have the sizes.
  Outcome noted(const nb::object& recorders, const Found& found, Objects a, bool biased) {
    nb::object selection = nb::steal(PyObject_GetAttr(found.plan.ptr(), names().selection));
    if (selection.is_valid() && a != nullptr) {
      selection = nb::steal(PyObject_CallFunctionObjArgs(here_[kResized], selection.ptr(), a[0], a[1], a[3],
                                                         biased ? a[4] : Py_None, nullptr));
    }
    if (!selection.is_valid()) return kError;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(recorders.ptr()); ++i) {
      PyObject* const ran = PyTuple_GET_ITEM(recorders.ptr(), i);
      const nb::object done = nb::steal(PyObject_CallMethodOneArg(ran, names().append, selection.ptr()));
      if (!done.is_valid()) return kError;
    }
    return kYes;
  }

  static std::size_t place_of(PyObject* const* fields) {
    std::size_t mixed = 0;
    for (const int i : {0, 1, 5, 19}) mixed = mixed * 31 + reinterpret_cast<std::size_t>(fields[i]) / 16;
    return mixed % kRecent;
  }

  static PyObject* first_of(PyObject* several) {
    if (several == nullptr) return nullptr;
    PyObject* const first = PyTuple_Check(several) && PyTuple_GET_SIZE(several) > 0
                                ? Py_NewRef(PyTuple_GET_ITEM(several, 0))
                                : PySequence_GetItem(several, 0);
    Py_DECREF(several);
    return first;
  }

  static constexpr std::size_t kRecent = 16;

  Surroundings here_;
  Keys keys_;
  Recent recent_[kRecent];
};

}  // namespace polyattn
