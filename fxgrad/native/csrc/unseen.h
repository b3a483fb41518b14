// What we run ourselves is seen by no TorchDispatchMode of the user's, and by no observer of ours.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fxgrad {

constexpr c10::DispatchKeySet kModes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// All of our own code runs where torch functions are off, in Python (`without_torch_function`) and here (`OfOurOwn`).  That
// is the thread's, so that every call that is being observed there knows, however they are nested.
inline bool of_our_own() {
  return at::impl::PythonTorchFunctionTLS::get_disabled_state() == at::impl::TorchFunctionDisabledState::ALL_DISABLED;
}

class OfOurOwn {
 public:
  OfOurOwn() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~OfOurOwn() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }
  OfOurOwn(const OfOurOwn&) = delete;
  OfOurOwn& operator=(const OfOurOwn&) = delete;

 private:
  at::impl::TorchFunctionDisabledState before_;
};

}  // namespace fxgrad
