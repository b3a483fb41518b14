// Which forward calls of a thread are told of the operators that it calls.
//
// torch tells a callback of every operator, those inside of others too, and makes its arguments and results ready for it.
// A model's operators have some two to five inside, of which nobody wants to know: the callback is off for these.  That
// is a matter of this callback alone, which a profiler of the user's does not notice.
#pragma once

namespace fxgrad {

class Forward;

// From here on `forward` is told, until `unlisten`.  How deep in operators it is.
int listen(Forward* forward);
void unlisten(Forward* forward);
// How many operators this thread is inside of, of those that were told.
int depth_of_operators();

}  // namespace fxgrad
