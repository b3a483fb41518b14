#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The native recorder of fxgrad.";
  fxgrad::bind_statistics(module);
  fxgrad::bind_record(module);
  fxgrad::bind_observer(module);
  fxgrad::bind_looking(module);
  fxgrad::bind_follower(module);
}
