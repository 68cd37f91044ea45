// Handlers of XLA's foreign function interface; xla.cpp says what a call looks like.
#pragma once

#include "xla_abi.h"

namespace polyattn::xla {

Error* forward(Frame* frame);
Error* backward(Frame* frame);

}  // namespace polyattn::xla
