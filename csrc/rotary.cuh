// Rotary embedding: dimensions i and i + half of a head turn by position * theta^(-i / half).
//
// Angles are counted in turns, as 64-bit fractions of one: with f = 2^64 theta^(-i / half) / 2 pi, rounded, the product
// position * f modulo 2^64, which is what integers compute, has lost nothing but whole turns. Of it 32 bits suffice for
// fp32: their distance to the nearest quarter of a turn goes through polynomials (Cephes, Moshier 1992), and the
// quarter swaps and signs them.
#pragma once

#include <cmath>

#include "common.cuh"

namespace mor {

// f of i, given log2 of theta^(-1 / half)
__device__ __forceinline__ int64_t frequency(int i, double log2_step) {
  constexpr double kTurnsPerRadian = 0.15915494309189533577;
  const double turns = kTurnsPerRadian * exp2(i * log2_step);
  return static_cast<int64_t>((turns - floor(turns + 0.5)) * 18446744073709551616.0);  // 2^64; at most half a turn
}

// Of a block's pairs, in shared memory, as far as there is room: all threads work them out, and then wait for each
// other.
struct Frequencies {
  static constexpr int kKnown = 128;
  int64_t known[kKnown];

  __device__ void fill(int half, double log2_step) {
    for (int i = threadIdx.x; i < min(half, kKnown); i += blockDim.x) known[i] = frequency(i, log2_step);
    __syncthreads();
  }
  __device__ int64_t at(int i, double log2_step) const { return i < kKnown ? known[i] : frequency(i, log2_step); }
};

// Which heads of which token a thread has: some, a share, and of them a piece. A block has a few tokens, or a part of
// one.
template <int kThreads>
struct Work {
  int64_t tokens;
  int together;          // tokens of a block
  Divisor token, share;  // threads of each

  Work(int64_t tokens, int shares, int pieces)
      : tokens(tokens), together(std::max(kThreads / (shares * pieces), 1)), token(shares * pieces), share(pieces) {}

  dim3 grid() const {
    return dim3(ceil_div<int64_t>(tokens, together), ceil_div(together * token.divisor, kThreads));
  }
};

struct Task {
  int64_t token;
  int share, piece;
  bool there;

  template <int kThreads>
  __device__ __forceinline__ explicit Task(const Work<kThreads>& work) {
    const int id = blockIdx.y * kThreads + threadIdx.x, nth = work.token(id), rest = id - nth * work.token.divisor;
    token = int64_t(blockIdx.x) * work.together + nth;
    share = work.share(rest), piece = rest - share * work.share.divisor;
    there = nth < work.together && token < work.tokens;
  }
};

inline double log2_step(double theta, int half) { return -std::log2(theta) / std::max(half, 1); }

// The cosine and sine of a 32-bit fraction of a turn.
__device__ __forceinline__ void cos_sin(int turn, float& cos, float& sin) {
  constexpr float kRadians = 1.4629180792671596e-9f;  // 2 pi / 2^32
  const int quarter = ((turn >> 29) + 1) >> 1;        // the nearest, -2..2
  const float x = float(int(unsigned(turn) - (unsigned(quarter) << 30))) * kRadians;  // at most pi / 4
  const float y = x * x;
  const float s = x + x * y * (-1.6666654611e-1f + y * (8.3321608736e-3f + y * -1.9515295891e-4f));
  const float c = 1.0f - 0.5f * y +
                  y * y * (4.166664568298827e-2f + y * (-1.388731625493765e-3f + y * 2.443315711809948e-5f));
  const bool odd = quarter & 1;
  cos = odd ? s : c, sin = odd ? c : s;
  if ((quarter + 1) & 2) cos = -cos;
  if (quarter & 2) sin = -sin;
}

// Those of pairs i to i + N - 1 at a position.
template <int N>
__device__ __forceinline__ void angles(const Frequencies& frequencies, double log2_step, int i, int64_t position,
                                       float (&cos)[N], float (&sin)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e)
    cos_sin(int(uint64_t(position) * uint64_t(frequencies.at(i + e, log2_step)) >> 32), cos[e], sin[e]);
}

template <int N>
__device__ __forceinline__ void turn_pairs(const float (&cos)[N], const float (&sin)[N], float (&a)[N], float (&b)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const float turned = a[e] * cos[e] - b[e] * sin[e];
    b[e] = b[e] * cos[e] + a[e] * sin[e];
    a[e] = turned;
  }
}

__device__ __forceinline__ int64_t load_position(const void* positions, int dtype, int64_t at) {
  return dtype ? static_cast<const int*>(positions)[at] : static_cast<const int64_t*>(positions)[at];
}

}  // namespace mor
