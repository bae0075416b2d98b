// A kernel's own source, and the way to its entries.  Compiled with what reports each access to
// memory (machine.cpp, "accesses").
#include <cstring>

#include "cuda.hpp"
#include KERNEL

template <typename Params>
static void call(void (*entry)(Params), const void* params) {
  entry(*static_cast<const Params*>(params));
}

// ENTRIES is a list like "ENTRY(a) ENTRY(b)".
extern "C" __attribute__((visibility("default"))) void run_entry(const char* name,
                                                                 const void* params) {
#define ENTRY(entry) \
  if (std::strcmp(name, #entry) == 0) return call(entry, params);
  ENTRIES
}
