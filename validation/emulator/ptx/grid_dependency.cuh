// As ptx/grid_dependency.cuh.  Launches run one after the other.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void griddepcontrol_launch_dependents() {}
FA_DEVICE void griddepcontrol_wait() {}
