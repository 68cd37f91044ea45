// Runs one function on several threads, and keeps one scratch buffer for each thread.
#pragma once

#include <cstddef>

namespace polyattn {

// Calls body(context, i) once for every i in 0 .. threads - 1 and returns when all are done.
//
// The calls may run at once or one after another on fewer threads, so a body must not wait for
// another one. It must not throw. Inside a parallel region (ours or OpenMP's) everything runs on
// the calling thread; threads == 1 is a plain call.
//
// Asking for the same number each time is cheapest: libgomp ends the workers that a smaller region
// does not need.
void parallel(int threads, void (*body)(void* context, int thread), void* context);

// Whose workers parallel() would use now: "libgomp of the process" or "own".
const char* pool_name();

// At least `bytes` bytes, aligned to 64, that stay with the calling thread until its next call of
// scratch(); the contents are undefined. The memory is kept for the thread's next attention call,
// so that it pays for page faults once. Returns nullptr when there is no memory.
std::byte* scratch(size_t bytes);

}  // namespace polyattn
