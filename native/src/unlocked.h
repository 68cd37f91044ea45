// Work without the interpreter's lock, also in threads that outlive the interpreter.
#pragma once

#include <Python.h>

#include <cstddef>  // what defines __GLIBCXX__

#if defined(__GLIBC__) && defined(__GLIBCXX__)
#define POLYATTN_EXIT_UNWINDS 1
#include <cxxabi.h>
#include <unistd.h>
#endif

namespace polyattn {

// Gives up the interpreter's lock for as long as it lives.
//
// A daemon thread may still be at work while the program ends. Before Python 3.14 the interpreter
// then ends the thread as it asks for the lock, by pthread_exit; with glibc that unwinds the stack
// like an exception, and the first frame that lets none through ends the process by an abort. Such
// a thread stays here instead until the process is gone, as Python 3.14 itself does it.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  void lock() {
#if defined(POLYATTN_EXIT_UNWINDS)
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();  // an end of this block would end the process
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }

  PyThreadState* state_;
};

}  // namespace polyattn
