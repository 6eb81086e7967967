// csrc/instructions.cuh for a CPU: see there for what each does.
#pragma once

#include "common.cuh"

namespace mor {

template <class T>
T* launched_memory() { return reinterpret_cast<T*>(emulator::shared()); }

template <class T>
T kept(T x) { return x; }

inline unsigned shared_address(const void* p) {
  const auto at = static_cast<const char*>(p) - emulator::shared();
  if (at < 0 || at >= emulator::shared_bytes) emulator::fail("an address isn't of the memory that the launch asked for");
  return unsigned(at);
}

inline char* shared_at(unsigned address, unsigned unit = 16) {
  if (address % unit || address + unit > emulator::shared_bytes) emulator::fail("a bad address of shared memory");
  return emulator::shared() + address;
}

inline void copy_async(unsigned to, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a copy from an address that isn't a multiple of 16");
  emulator::fibers[emulator::current].open.push_back({to, from});
}

inline void copy_async_or_clear(unsigned to, const void* from, bool there) {
  static const char zeros[16]{};
  copy_async(to, there ? from : zeros);
}

inline void clear_shared(unsigned to) { std::memset(shared_at(to), 0, 16); }
inline void load_shared(unsigned (&x)[4], unsigned from) { std::memcpy(x, shared_at(from), 16); }

inline void end_group() {
  auto& fiber = emulator::fibers[emulator::current];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

template <int N>
void await_groups() {
  auto& groups = emulator::fibers[emulator::current].groups;
  for (; int(groups.size()) > N; groups.erase(groups.begin()))
    for (const auto& copy : groups.front()) std::memcpy(shared_at(copy.to), copy.from, 16);
}

struct Words {
  unsigned x[4];
};

inline unsigned pair_at(unsigned row, int first, unsigned next_row, int second) {
  uint16_t low, high;
  std::memcpy(&low, shared_at(row) + 2 * first, 2), std::memcpy(&high, shared_at(next_row) + 2 * second, 2);
  return low | unsigned(high) << 16;
}

inline void load_matrices(unsigned (&x)[4], unsigned row) {
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  const Words words = emulator::together(20, row, [&](auto get) {
    Words words;
    for (int i = 0; i < 4; ++i) words.x[i] = pair_at(get(8 * i + g), 2 * t, get(8 * i + g), 2 * t + 1);
    return words;
  });
  std::copy(words.x, words.x + 4, x);
}

inline void load_transposed(unsigned (&x)[4], unsigned row) {
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  const Words words = emulator::together(21, row, [&](auto get) {
    Words words;
    for (int i = 0; i < 4; ++i) words.x[i] = pair_at(get(8 * i + 2 * t), g, get(8 * i + 2 * t + 1), g);
    return words;
  });
  std::copy(words.x, words.x + 4, x);
}

inline unsigned transposed(unsigned x) {
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  return emulator::together(22, x, [&](auto get) {
    const auto at = [&](int row) { return get(4 * row + g / 2) >> 16 * (g % 2) & 0xffff; };
    return at(2 * t) | at(2 * t + 1) << 16;
  });
}

template <class T>
float element_of(unsigned word, int i) {
  const uint16_t bits = word >> 16 * i;
  T x;
  std::memcpy(&x, &bits, 2);
  return to_float(x);
}

template <class T>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Operands {
    unsigned a[4], b[2];
  };
  struct Sums {
    float x[4];
  };
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  const Sums sums = emulator::together(23, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto get) {
    Sums sums;
    for (int i = 0; i < 4; ++i) {
      const int m = g + i / 2 * 8, n = 2 * t + i % 2;
      sums.x[i] = c[i];
      for (int k = 0; k < 16; ++k) {
        const Operands of_m = get(m % 8 * 4 + k % 8 / 2), of_n = get(n * 4 + k % 8 / 2);
        sums.x[i] += element_of<T>(of_m.a[m / 8 + k / 8 * 2], k % 2) * element_of<T>(of_n.b[k / 8], k % 2);
      }
    }
    return sums;
  });
  std::copy(sums.x, sums.x + 4, c);
}

inline float exp2_approx(float x) { return std::exp2(x); }

inline unsigned from_e4m3(unsigned pair) {
  unsigned both = 0;
  for (int i = 0; i < 2; ++i) {
    const unsigned code = pair >> 8 * i & 0xff, exponent = code >> 3 & 15, mantissa = code & 7;
    float x = exponent ? std::ldexp(1.0f + mantissa / 8.0f, int(exponent) - 7) : std::ldexp(mantissa / 8.0f, -6);
    if ((code & 0x7f) == 0x7f) x = NAN;
    const fp16 half = from_float<fp16>(code & 0x80 ? -x : x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    both |= unsigned(bits) << 16 * i;
  }
  return both;
}

template <class T>
unsigned multiply_pairs(unsigned a, unsigned b) {
  unsigned both = 0;
  for (int i = 0; i < 2; ++i) {
    const T y = from_float<T>(element_of<T>(a, i) * element_of<T>(b, i));
    uint16_t bits;
    std::memcpy(&bits, &y, 2);
    both |= unsigned(bits) << 16 * i;
  }
  return both;
}

inline void request_line(const void*) {}

inline void arrive_in_cluster() {}
inline void await_cluster() { emulator::arrive(emulator::of_cluster, emulator::threads * emulator::blocks); }
inline void end_together() { await_cluster(); }

template <class T>
T of_cluster(unsigned own, int rank, bool there) {
  T x{};
  if (!there) return x;
  if (rank >= emulator::blocks) emulator::fail("a block that the cluster hasn't got");
  if (own % sizeof(T) || own + sizeof(T) > emulator::shared_bytes) emulator::fail("a bad address of a cluster");
  std::memcpy(&x, emulator::memory[rank] + own, sizeof(T));
  return x;
}

inline float4 load_of_cluster4(unsigned own, int rank, bool there) { return of_cluster<float4>(own, rank, there); }
inline float load_of_cluster(unsigned own, int rank, bool there) { return of_cluster<float>(own, rank, there); }

inline unsigned long long to_stay() { return 0; }
inline unsigned long long to_leave() { return 0; }
inline int4 load(const int4* from, bool there, unsigned long long) { return there ? aligned(from) : int4{}; }
inline void store(int4* to, const int4& bits, unsigned long long) { __stcg(to, bits); }

}  // namespace mor
