// A number as a type: what a lambda is told when it is compiled.
#pragma once

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
