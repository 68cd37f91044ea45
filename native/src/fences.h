// What the address sanitizer is told of memory that is kept between calls and cut into parts: which of it is
// nobody's. Elsewhere nothing.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define POLYATTN_FENCES 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POLYATTN_FENCES 1
#endif
#endif

#ifdef POLYATTN_FENCES
#include <sanitizer/asan_interface.h>
#endif

namespace polyattn {

#ifdef POLYATTN_FENCES
constexpr size_t kFence = 64;  // bytes behind each part
inline void close_off(const void* from, size_t bytes) { __asan_poison_memory_region(from, bytes); }
inline void open_up(const void* from, size_t bytes) { __asan_unpoison_memory_region(from, bytes); }
#else
constexpr size_t kFence = 0;
inline void close_off(const void*, size_t) {}
inline void open_up(const void*, size_t) {}
#endif

}  // namespace polyattn
