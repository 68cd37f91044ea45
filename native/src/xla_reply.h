// What every handler of XLA's foreign function interface answers.
#pragma once

#include "xla_abi.h"

namespace polyattn::xla {

constexpr int kInvalidArgument = 3, kResourceExhausted = 8;

// Whether a call asks for metadata only; then it is answered.
inline bool tells_metadata(const Frame& frame) {
  for (Extension* one = frame.extensions; one != nullptr; one = one->next) {
    if (one->type != 1) continue;
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(one)->metadata;
    // older versions ask without an interface: ours goes by all of it from 0.1 on
    metadata.version.major = frame.api == nullptr ? 0 : frame.api->version.major;
    metadata.version.minor = frame.api == nullptr ? 1 : frame.api->version.minor;
    metadata.traits = 0;
    return true;
  }
  return false;
}

inline Error* failed(const Frame& frame, const char* message, int code) {
  ErrorArguments arguments{sizeof arguments, nullptr, message, code};
  return frame.api->create_error(&arguments);
}

}  // namespace polyattn::xla
