// What each file of the extension brings to its Python module; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>  // without torch, whose headers take ten seconds

namespace fxgrad {

void bind_statistics(pybind11::module_& module);
void bind_record(pybind11::module_& module);
void bind_observer(pybind11::module_& module);
void bind_looking(pybind11::module_& module);
void bind_follower(pybind11::module_& module);

}  // namespace fxgrad
