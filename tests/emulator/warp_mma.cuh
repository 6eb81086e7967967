#pragma once
#include "common.cuh"
namespace mor {
inline unsigned shared_address(const void* p) { long d = (const char*)p - emu::shared_; if (d < 0 || d >= (1 << 18)) abort(); return d; }
inline void do_copy(const emu::Copy& c) { if (c.to % 16) abort(); if (c.there) { if (uintptr_t(c.from) % 16) abort(); memcpy(emu::shared_ + c.to, c.from, 16); } else memset(emu::shared_ + c.to, 0, 16); }
inline void clear_shared(unsigned to) { if (to % 16) abort(); memset(emu::shared_ + to, 0, 16); }
inline void copy_async(unsigned to, const void* from) { const bool there = true; emu::Copy c{to, from, there}; if (emu::eager || !there) do_copy(c); else emu::fibers[emu::current].open.push_back(c); }
inline void end_group() { auto& f = emu::fibers[emu::current]; f.groups.push_back(f.open); f.open.clear(); }
template <int N> void await_groups() { auto& f = emu::fibers[emu::current]; while (int(f.groups.size()) > N) { for (auto& c : f.groups[0]) do_copy(c); f.groups.erase(f.groups.begin()); } }
inline void load_any_matrices(unsigned (&x)[4], unsigned row, bool transposed) {
  int l = emu::current % 32, g = l / 4, t = l % 4;
  if (row % 16) abort();
  struct R { unsigned x[4]; };
  R r = emu::collective(transposed ? 6 : 7, row, [&](auto get) {
    R r;
    for (int m = 0; m < 4; ++m) {
      uint16_t a, b;
      if (!transposed) { const char* p = emu::shared_ + get(8 * m + g); memcpy(&a, p + 4 * t, 2); memcpy(&b, p + 4 * t + 2, 2); }
      else { memcpy(&a, emu::shared_ + get(8 * m + 2 * t) + 2 * g, 2); memcpy(&b, emu::shared_ + get(8 * m + 2 * t + 1) + 2 * g, 2); }
      r.x[m] = a | unsigned(b) << 16;
    }
    return r; });
  for (int m = 0; m < 4; ++m) x[m] = r.x[m];
}
inline void load_matrices(unsigned (&x)[4], unsigned row) { load_any_matrices(x, row, false); }
inline void load_transposed(unsigned (&x)[4], unsigned row) { load_any_matrices(x, row, true); }
template <class T> float half_of(unsigned w, int i) { uint16_t h = i ? w >> 16 : w; T x; memcpy(&x, &h, 2); return float(x); }
template <class T> void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct In { unsigned a[4], b[2]; } in{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  struct R { float c[4]; };
  int l = emu::current % 32, g = l / 4, t = l % 4;
  R r = emu::collective(8, in, [&](auto get) {
    R r;
    for (int i = 0; i < 4; ++i) {
      int m = g + i / 2 * 8, n = 2 * t + i % 2;
      float sum = c[i];
      for (int k = 0; k < 16; ++k) {
        // A: row m, col k: lane (m%8)*4 + (k%8)/2, register (m>=8) + 2*(k>=8), half k%2
        In x = get(m % 8 * 4 + k % 8 / 2), y = get(n * 4 + k % 8 / 2);
        sum += half_of<T>(x.a[(m >= 8) + 2 * (k >= 8)], k % 2) * half_of<T>(y.b[k >= 8], k % 2);
      }
      r.c[i] = sum;
    }
    return r; });
  for (int i = 0; i < 4; ++i) c[i] = r.c[i];
}
inline float exp2_approx(float x) { return exp2f(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) { uint64_t v = uint64_t(b) << 32 | a; unsigned r = 0; for (int i = 0; i < 4; ++i) r |= unsigned(v >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i; return r; }
inline unsigned from_e4m3(unsigned pair) {
  pair &= 0xffff;
  const unsigned wide = __byte_perm(pair, 0, 0x1404);
  const unsigned small = (wide & 0x80008000u) | (wide & 0x7f007f00u) >> 1;
  unsigned r = 0;
  for (int i = 0; i < 2; ++i) { uint16_t h = small >> 16 * i; __half x; memcpy(&x, &h, 2); __half y = __float2half_rn(float(x) * 256.0f); memcpy(&h, &y, 2); if (std::fabs(float(y)) == 480.0f) h = 0xffff; r |= unsigned(h) << 16 * i; }
  return r;
}
}
