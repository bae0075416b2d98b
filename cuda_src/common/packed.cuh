// Whether a build is for packed sequences.
#pragma once

#ifndef FA_PACKED
#define FA_PACKED 0
#endif
constexpr bool kPacked = FA_PACKED;
