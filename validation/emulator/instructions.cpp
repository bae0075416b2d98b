// What warps, warpgroups and the copy engine do.
#include <algorithm>
#include <utility>

#include "machine.hpp"

namespace machine {

// ------------------------------------------------------------------------------------------- warps
struct Exchange {
  int lane;
  uint32_t mine, got;
};

uint32_t shuffle(uint32_t x, int lane) {
  Exchange e{lane, x, 0};
  meet(32, "shfl", e, [](Exchange** all) {
    for (int i = 0; i < 32; ++i) all[i]->got = all[all[i]->lane % 32]->mine;
  });
  return e.got;
}

uint32_t vote(bool x) {
  Exchange e{0, x, 0};
  meet(32, "vote", e, [](Exchange** all) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= all[i]->mine << i;
    for (int i = 0; i < 32; ++i) all[i]->got = votes;
  });
  return e.got;
}

void sync_warp() {
  Exchange e{};
  meet(32, "syncwarp", e, [](Exchange**) {});
}

// Any lane may be chosen; always the same one of a warp.
bool elect() {
  const uint32_t chosen = shuffle(static_cast<uint32_t>(block->random(32)), 0);
  return chosen == current->tid.x % 32;
}

struct MatrixAccess {
  uint32_t address;
  uint32_t r[4];
};

void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
  MatrixAccess access{address, {}};
  shared_at(address, 16, 16);
  check_filled("ldmatrix", address, 16);
  meet(32, "ldmatrix", access, [transposed](MatrixAccess** lanes) {
    for (int m = 0; m < 4; ++m) {
      uint16_t matrix[8][8];
      for (int row = 0; row < 8; ++row) {
        std::memcpy(matrix[row], shared_at(lanes[8 * m + row]->address, 16, 16), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        const uint16_t low = transposed ? matrix[j][i] : matrix[i][j];
        const uint16_t high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
        lanes[lane]->r[m] = low | uint32_t(high) << 16;
      }
    }
  });
  std::memcpy(r, access.r, 16);
}

void store_matrices(uint32_t address, const uint32_t (&r)[4], bool transposed) {
  MatrixAccess access{address, {r[0], r[1], r[2], r[3]}};
  shared_at(address, 16, 16);
  const int warp = current->tid.x / 32;
  meet(32, "stmatrix", access, [warp, transposed](MatrixAccess** lanes) {
    for (int m = 0; m < 4; ++m) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int e = 0; e < 2; ++e) {
          const int i = lane / 4, j = lane % 4 * 2 + e;
          const uint32_t at =
              lanes[8 * m + (transposed ? j : i)]->address + (transposed ? i : j) * 2;
          const uint16_t x = uint16_t(lanes[lane]->r[m] >> 16 * e);
          std::memcpy(shared_at(at, 2), &x, 2);
          fill(at, 2, writing(*block->fibers[warp * 32 + lane]));
        }
      }
    }
  });
}

bool truncating;

// Adds to an accumulator the product of one step over k: rounded once, or as tensor cores were seen
// to.  There an accumulator that 17.5 of its ulp are added to grows by 16, and with 1.75 it stays:
// the smaller of the two is cut, towards zero, to twice the ulp of the larger (2 is the smallest
// power of two that does both), and so is what float32 cannot hold of the sum.
static float add_truncated(float c, double product) {
  if (!std::isfinite(c + product)) return static_cast<float>(c + product);
  int exponent;
  double low = c, high = product;
  if (std::fabs(low) > std::fabs(high)) std::swap(low, high);
  std::frexp(high, &exponent);
  const double sum = high + std::ldexp(std::trunc(std::ldexp(low, 23 - exponent)), exponent - 23);
  const float rounded = static_cast<float>(sum);
  return std::fabs(rounded) > std::fabs(sum) ? std::nextafter(rounded, 0.0f) : rounded;
}

// Compiled twice where one compiler can, because the sums of products are most of the work; both
// give the same bits: a product is exact, and is added with one rounding.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
#define FA_WIDE __attribute__((target_clones("default", "arch=haswell")))
#else
#define FA_WIDE
#endif

FA_WIDE static void widen_all(const uint16_t* from, double* to, int count, bool bf16) {
  if (bf16) {
    for (int i = 0; i < count; ++i) to[i] = widen(from[i], true);
  } else {
    for (int i = 0; i < count; ++i) to[i] = widen(from[i], false);
  }
}

// One step over k, of 16: to each c is added the sum of x[k] y[k][i], in the order of k.
FA_WIDE static void multiply_row(const double* x, const double* y, int stride, int n, float* c) {
  double sum[256];
  for (int k = 0; k < 16; k += 4) {
    const double *y0 = y + k * stride, *y1 = y0 + stride, *y2 = y1 + stride, *y3 = y2 + stride;
    for (int i = 0; i < n; ++i) {
      const double before = k == 0 ? 0.0 : sum[i];
      sum[i] = before + x[k] * y0[i] + x[k + 1] * y1[i] + x[k + 2] * y2[i] + x[k + 3] * y3[i];
    }
  }
  if (truncating) {
    for (int i = 0; i < n; ++i) c[i] = add_truncated(c[i], sum[i]);
  } else {
    for (int i = 0; i < n; ++i) c[i] = static_cast<float>(c[i] + sum[i]);
  }
}

struct MmaArgument {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16) {
  MmaArgument argument{d, a, {b0, b1}};
  meet(32, "mma.sync", argument, [bf16](MmaArgument** lanes) {
    uint16_t bits[16 * 16 + 16 * 8];  // of A and B
    double x[16 * 16 + 16 * 8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = lanes[lane]->a[i];
        std::memcpy(bits + 16 * (g + i % 2 * 8) + 2 * t + i / 2 * 8, &word, 4);
      }
      for (int i = 0; i < 4; ++i) {
        const int k = 2 * t + 8 * (i / 2) + i % 2;
        bits[256 + 8 * k + g] = uint16_t(lanes[lane]->b[i / 2] >> 16 * (i % 2));
      }
    }
    widen_all(bits, x, 16 * 16 + 16 * 8, bf16);
    for (int row = 0; row < 16; ++row) {
      float c[8];
      for (int i = 0; i < 4; ++i)
        std::memcpy(c + 2 * i, lanes[row % 8 * 4 + i]->d + row / 8 * 2, 8);
      multiply_row(x + 16 * row, x + 256, 8, 8, c);
      for (int i = 0; i < 4; ++i)
        std::memcpy(lanes[row % 8 * 4 + i]->d + row / 8 * 2, c + 2 * i, 8);
    }
  });
}

struct MmaArgument64 {
  double* d;
  const double *a, *b;
};

// Each product is added by an operation that rounds once.
FA_WIDE static void fma_row(const double* x, const double* y, int count, double* c) {
  for (int k = 0; k < count; ++k) {
    for (int i = 0; i < 8; ++i) c[i] = std::fma(x[k], y[8 * k + i], c[i]);
  }
}

void multiply_float64(double* d, const double* a, const double* b, int m, int k) {
  MmaArgument64 argument{d, a, b};
  meet(32, "mma.sync", argument, [m, k](MmaArgument64** lanes) {
    double x[16][16], y[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < k / 4; ++i) {
        for (int h = 0; h < m / 8; ++h) x[g + 8 * h][t + 4 * i] = lanes[lane]->a[m / 8 * i + h];
        y[t + 4 * i][g] = lanes[lane]->b[i];
      }
    }
    for (int row = 0; row < m; ++row) {
      double c[8];
      for (int i = 0; i < 4; ++i)
        std::memcpy(c + 2 * i, lanes[row % 8 * 4 + i]->d + row / 8 * 2, 16);
      fma_row(x[row], y[0], k, c);
      for (int i = 0; i < 4; ++i)
        std::memcpy(lanes[row % 8 * 4 + i]->d + row / 8 * 2, c + 2 * i, 16);
    }
  });
}

// ------------------------------------------------------------------------------------------- wgmma
// A matrix of blocks of 64 columns, each with rows of 128 bytes, in the 128-byte swizzle.
struct Matrix {
  uint32_t start, leading, stride;
  explicit Matrix(uint64_t descriptor)
      : start(uint32_t(descriptor & 0x3fff) << 4),
        leading(descriptor >> 12 & 0x3fff0),
        stride(descriptor >> 28 & 0x3fff0) {}
  // The swizzle acts on addresses: bits 4 to 6 are exchanged with bits 7 to 9.
  uint32_t address(int row, int col) const {
    const uint32_t linear = start + uint32_t(col / 64) * leading + uint32_t(row / 8) * stride +
                            uint32_t(row % 8) * 128 + col % 64 * 2;
    return linear ^ (linear >> 3 & 0x70);
  }
  template <typename F>
  void each_chunk(int rows, int cols, const F& f) const {
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; col += 8) f(row, col, address(row, col));
    }
  }
};

static void check_operand(const Matrix& matrix, int rows, int cols) {
  matrix.each_chunk(rows, cols, [](int, int, uint32_t at) {
    shared_at(at, 16, 16);
    check_filled("wgmma", at, 16);
    check_fenced("wgmma", at, 16);
  });
}

// A product once all its threads have asked for it.
struct Started {
  Product product;
  float (*d[128])[4];
  uint32_t a[128][4];

  void check() const {
    const Matrix b(product.b_descriptor);
    if (product.a == nullptr) {
      const bool rows = product.a_k_major;
      check_operand(Matrix(product.a_descriptor), rows ? 64 : 16, rows ? 16 : 64);
    }
    check_operand(b, product.k_major ? product.n : 16, product.k_major ? 16 : product.n);
  }

  void run() const {
    const int n = product.n;
    static uint16_t a_bits[64][16], b_bits[16][256];
    static double x[64][16], y[16][256];
    const auto read = [](uint32_t at, uint16_t* to, int stride) {
      uint16_t bits[8];
      check_filled("wgmma", at, 16);
      std::memcpy(bits, shared_at(at, 16, 16), 16);
      for (int i = 0; i < 8; ++i) to[i * stride] = bits[i];
    };
    if (product.a == nullptr) {
      const bool rows = product.a_k_major;  // of A, as stored, are its rows
      Matrix(product.a_descriptor)
          .each_chunk(rows ? 64 : 16, rows ? 16 : 64, [&](int row, int col, uint32_t at) {
            read(at, rows ? &a_bits[row][col] : &a_bits[col][row], rows ? 1 : 16);
          });
    } else {
      for (int m = 0; m < 64; ++m) {
        for (int k = 0; k < 16; k += 2) {
          const uint32_t word = a[m / 16 * 32 + m % 8 * 4 + k % 8 / 2][m % 16 / 8 + k / 8 * 2];
          std::memcpy(&a_bits[m][k], &word, 4);
        }
      }
    }
    const bool rows = product.k_major;  // of B, as stored, are its columns
    Matrix(product.b_descriptor)
        .each_chunk(rows ? n : 16, rows ? 16 : n, [&](int row, int col, uint32_t at) {
          read(at, rows ? &b_bits[col][row] : &b_bits[row][col], rows ? 256 : 1);
        });
    widen_all(a_bits[0], x[0], 64 * 16, product.bf16);
    for (int k = 0; k < 16; ++k) widen_all(b_bits[k], y[k], n, product.bf16);
    for (int m = 0; m < 64; ++m) {
      float c[256] = {};
      float (*const* row)[4] = d + m / 16 * 32 + m % 8 * 4;  // of four threads
      const int half = m % 16 / 8 * 2;
      for (int i = 0; product.add && i < n; i += 2) {
        std::memcpy(c + i, &row[i % 8 / 2][i / 8][half], 8);
      }
      multiply_row(x[m], y[0], 256, n, c);
      for (int i = 0; i < n; i += 2) std::memcpy(&row[i % 8 / 2][i / 8][half], c + i, 8);
    }
  }
};

void start_product(const Product& product) {
  lend(product.d, static_cast<size_t>(product.n) * 2);
  if (product.watched) lend(product.a, 16);
  const int warpgroup = current->tid.x / 128;
  meet(128, "wgmma", const_cast<Product&>(product), [warpgroup](Product** all) {
    const auto started = std::make_shared<Started>();
    started->product = *all[0];
    for (int i = 0; i < 128; ++i) {
      const Product &mine = *all[i], &first = *all[0];
      if (mine.b_descriptor != first.b_descriptor || mine.a_descriptor != first.a_descriptor) {
        fail("threads of one wgmma name different matrices");
      }
      started->d[i] = mine.d;
      if (mine.a != nullptr) std::memcpy(started->a[i], mine.a, 16);
    }
    started->check();
    block->products[warpgroup].queue.emplace_back(self().groups, [started] { started->run(); });
  });
}

void commit_products() {
  Exchange nothing{};
  meet(128, "wgmma.commit_group", nothing, [](Exchange**) {});
  ++self().groups;
}

void wait_products(int pending) {
  Fiber& fiber = self();
  const uint64_t until = fiber.groups > uint64_t(pending) ? fiber.groups - pending : 0;
  Products& products = block->products[fiber.tid.x / 128];
  if (products.over(until)) {
    take_turns();
  } else {
    products.parked.emplace_back(until, &fiber);
    sleep("wgmma.wait_group");
  }
  fiber.waited = std::max(fiber.waited, until);
}

// ---------------------------------------------------------------------------------------- cp.async
uint64_t CopyGroups::add() {
  ++groups.back().unread, ++groups.back().unwritten;
  return first + groups.size() - 1;
}

bool CopyGroups::over(size_t allowed, Left left) const {
  for (size_t i = 0; i + 1 + allowed < groups.size(); ++i) {
    if (groups[i].*left > 0) return false;
  }
  return true;
}

void CopyGroups::done(uint64_t group, Left left) {
  if (--(groups[group - first].*left) > 0 || waiter == nullptr || !over(pending, wanted)) return;
  wake(*std::exchange(waiter, nullptr));
}

void CopyGroups::commit() {
  size_t gone = 0;
  while (gone < groups.size() - 1 && groups[gone].unwritten == 0) ++gone;
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(gone));
  first += gone;
  groups.emplace_back();
}

void CopyGroups::wait(const char* where, int allowed, Left left) {
  pending = static_cast<size_t>(allowed);
  wanted = left;
  if (over(pending, wanted)) return take_turns();
  waiter = &self();
  sleep(where);
}

// The first of `size` bytes, 4, 8 or 16; the rest becomes zero.
void copy(uint32_t address, const void* global, uint32_t size, uint32_t bytes) {
  unsigned char* to = shared_at(address, static_cast<int>(size), static_cast<int>(size));
  if (bytes > size) fail("cp.async of more than " + std::to_string(size) + " bytes");
  if (bytes > 0 && reinterpret_cast<uintptr_t>(global) % size) fail("misaligned cp.async");
  Fiber* fiber = &self();
  const uint64_t group = fiber->copies.add();
  fill(address, static_cast<int>(size), kNothing);
  block->pending.push_back([=] {
    std::memset(to, 0, size);
    if (bytes > 0) std::memcpy(to, global, bytes);
    fill(address, static_cast<int>(size), writing(*fiber));
    fiber->copies.done(group, &CopyGroup::unread);
    fiber->copies.done(group, &CopyGroup::unwritten);
  });
}

void commit_copies() { self().copies.commit(); }
void wait_copies(int pending) {
  self().copies.wait("cp.async.wait_group", pending, &CopyGroup::unwritten);
}

// --------------------------------------------------------------------------------------------- TMA
// A box of an array in memory, and its place in shared memory.
struct Box {
  const unsigned long long* map;
  uint32_t shared;
  int c[5];

  Box(const unsigned long long* words, uint32_t address, const int (&at)[5])
      : map(words), shared(address) {
    std::copy(at, at + 5, c);
    if (box(4) * stride(4) != 128) fail("a box whose rows are not 128 bytes");
    if (shared % 128) fail("misaligned address of a box in shared memory");
    bool aligned = map[0] % 16 == 0;
    for (int axis = 0; axis < 4; ++axis) aligned = aligned && stride(axis) % 16 == 0;
    if (!aligned) fail("a tensor map of a misaligned array");
    shared_at(shared, static_cast<int>(bytes()));
  }
  int64_t shape(int64_t axis) const { return int64_t(map[1 + axis]); }
  int64_t stride(int64_t axis) const { return int64_t(map[6 + axis]); }
  int64_t box(int64_t axis) const { return int64_t(map[11 + axis]); }
  long bytes() const { return box(0) * box(1) * box(2) * box(3) * 128; }

  // Calls f(address in memory, shared address, elements that lie inside the array, bytes of one)
  // for each 16 bytes, in order; elements outside come last, or fill the 16 bytes.
  template <typename F>
  void each_chunk(const F& f) const {
    const int64_t size = stride(4), each = 16 / size;
    for (int64_t row = 0; row < bytes() / 128; ++row) {
      bool inside = true;
      uint64_t address = map[0];
      for (int64_t axis = 3, rest = row; axis >= 0; rest /= box(axis--)) {
        const int64_t at = c[4 - axis] + rest % box(axis);
        inside = inside && at >= 0 && at < shape(axis);
        address += uint64_t(at * stride(axis));
      }
      for (int64_t chunk = 0; chunk < 8; ++chunk) {
        const int64_t col = c[0] + each * chunk;
        if (col % each) fail("a box whose columns do not start at a multiple of 16 bytes");
        const int64_t left = inside && col >= 0 ? shape(4) - col : 0;
        const uint32_t to = shared + uint32_t(128 * row + 16 * chunk);
        f(reinterpret_cast<unsigned char*>(address + uint64_t(size * col)), to ^ (to >> 3 & 0x70),
          std::clamp<int64_t>(left, 0, each) * size);
      }
    }
  }
};

void load_box(uint32_t address, const unsigned long long* map, uint32_t barrier,
              const int (&c)[5]) {
  const Box box(map, address, c);
  check_fenced("TMA writes", address, static_cast<int>(box.bytes()));
  fill(address, static_cast<int>(box.bytes()), kNothing);
  block->pending.push_back([box, barrier] {
    box.each_chunk([](const unsigned char* from, uint32_t at, int64_t bytes) {
      unsigned char* to = shared_at(at, 16);
      std::memset(to, 0, 16);
      if (bytes > 0) std::memcpy(to, from, size_t(bytes));
      fill(at, 16, kAnyone);
    });
    progress(barrier, 0, box.bytes());
  });
}

// The source is read at one moment and written at a later one.
void store_box(const unsigned long long* map, uint32_t address, const int (&c)[5]) {
  const Box box(map, address, c);
  CopyGroups& stores = self().stores;
  const uint64_t group = stores.add();
  box.each_chunk([](unsigned char*, uint32_t at, int64_t bytes) {
    check_filled("a TMA store", at, static_cast<int>(bytes));
    check_fenced("a TMA store", at, static_cast<int>(bytes));
  });
  block->pending.push_back([box, group, &stores] {
    const auto data = std::make_shared<std::vector<unsigned char>>();
    box.each_chunk([&](unsigned char*, uint32_t at, int64_t bytes) {
      const unsigned char* from = shared_at(at, 16);
      check_filled("a TMA store", at, static_cast<int>(bytes));
      data->insert(data->end(), from, from + 16);
    });
    stores.done(group, &CopyGroup::unread);
    block->pending.push_back([box, group, &stores, data] {
      const unsigned char* from = data->data();
      box.each_chunk([&](unsigned char* to, uint32_t, int64_t bytes) {
        if (bytes > 0) std::memcpy(to, from, size_t(bytes));
        from += 16;
      });
      stores.done(group, &CopyGroup::unwritten);
    });
  });
}

static unsigned char* bulk_at(uint32_t address, const void* global, uint32_t bytes) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) fail("a misaligned bulk copy");
  return shared_at(address, static_cast<int>(bytes), 16);
}

void load_bytes(uint32_t address, const void* global, uint32_t bytes, uint32_t barrier) {
  unsigned char* to = bulk_at(address, global, bytes);
  check_fenced("a bulk copy writes", address, static_cast<int>(bytes));
  fill(address, static_cast<int>(bytes), kNothing);
  block->pending.push_back([=] {
    std::memcpy(to, global, bytes);
    fill(address, static_cast<int>(bytes), kAnyone);
    progress(barrier, 0, bytes);
  });
}

// As for a box: read at one moment, written, or added, at a later one.
void store_bytes(void* global, uint32_t address, uint32_t bytes, bool add) {
  const unsigned char* from = bulk_at(address, global, bytes);
  CopyGroups& stores = self().stores;
  const uint64_t group = stores.add();
  const int size = static_cast<int>(bytes);
  check_filled("a bulk copy", address, size);
  check_fenced("a bulk copy", address, size);
  block->pending.push_back([=, &stores] {
    check_filled("a bulk copy", address, size);
    const auto data = std::make_shared<std::vector<unsigned char>>(from, from + size);
    stores.done(group, &CopyGroup::unread);
    block->pending.push_back([=, &stores] {
      auto* to = static_cast<unsigned char*>(global);
      for (int i = 0; i < size; i += 4) {
        float x, sum = 0;
        std::memcpy(&x, data->data() + i, 4);
        std::memcpy(&sum, to + i, 4);
        sum += x;
        std::memcpy(to + i, add ? &sum : &x, 4);
      }
      stores.done(group, &CopyGroup::unwritten);
    });
  });
}

void commit_stores() { self().stores.commit(); }
void wait_stores(int pending, bool written) {
  self().stores.wait("cp.async.bulk.wait_group", pending,
                     written ? &CopyGroup::unwritten : &CopyGroup::unread);
}

}  // namespace machine
