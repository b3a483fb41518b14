// What we run ourselves is seen by no TorchDispatchMode of the user's.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fxgrad {

constexpr c10::DispatchKeySet kModes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

}  // namespace fxgrad
