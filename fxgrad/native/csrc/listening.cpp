#include "listening.h"

#include "observer.h"

#include <ATen/record_function.h>

#include <algorithm>

namespace fxgrad {

namespace {

constexpr int kAwake = -1;

struct Listening {
  std::vector<Forward*> forwards;  // the innermost last
  int depth = 0;                   // of operators
  int asleep = kAwake;             // the depth at which the callback is put on again
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

  void wake() {
    if (asleep == kAwake) return;
    asleep = kAwake;
    at::reenableCallback(handle);
  }
  // Inside of an operator that the innermost forward calls: what is called there is nobody's.
  void sleep(int until) {
    if (asleep != kAwake) return;
    asleep = until;
    at::disableCallback(handle);
  }
};
thread_local Listening listening;

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  Listening& here = listening;
  for (Forward* forward : here.forwards) forward->start(function);
  if (!here.forwards.empty() && here.depth > here.forwards.back()->depth()) here.sleep(here.forwards.back()->depth());
  here.depth++;
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  Listening& here = listening;
  here.depth--;
  if (here.depth <= here.asleep) here.wake();
  for (Forward* forward : here.forwards) forward->end(function);
}

}  // namespace

int depth_of_operators() { return listening.depth; }

int listen(Forward* forward) {
  Listening& here = listening;
  if (here.forwards.empty()) {
    here.depth = 0;
    here.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                                 .needsInputs(true)
                                                 .needsOutputs(true)
                                                 .scopes({at::RecordScope::FUNCTION}));
  }
  here.wake();  // a call inside of an operator: of one that is written in Python
  here.forwards.push_back(forward);
  return here.depth;
}

void unlisten(Forward* forward) {
  Listening& here = listening;
  auto& forwards = here.forwards;
  forwards.erase(std::remove(forwards.begin(), forwards.end(), forward), forwards.end());
  here.wake();
  if (forwards.empty()) at::removeCallback(here.handle);
}

}  // namespace fxgrad
