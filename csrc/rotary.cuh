// Rotary embedding: dimensions i and i + half of a head turn by position * theta^(-i / half).
//
// Angles are counted in turns, as 64-bit fractions of one: with f = 2^64 theta^(-i / half) / 2 pi, rounded, the product
// position * f modulo 2^64, which is what integers compute, has lost nothing but whole turns. Its distance to the nearest
// quarter of a turn goes through polynomials in fp32 (Cephes, Moshier 1992), and the quarter swaps and signs them.
#pragma once

#include <cmath>

#include "common.cuh"

namespace mor {

constexpr double kTurnsPerRadian = 0.15915494309189533577;
constexpr double kTurn = 18446744073709551616.0;  // 2^64

__host__ __device__ inline int64_t fraction_of_turn(double turns) {
  turns -= floor(turns + 0.5);  // at most half a turn
  return static_cast<int64_t>(turns * kTurn);
}

// f of each i: worked out by the host as far as a launch has room for them.
struct Rotation {
  static constexpr int kKnown = 128;
  int64_t known[kKnown];
  double log2_step;  // of theta^(-1 / half)

  __device__ int64_t frequency(int i) const {
    return i < kKnown ? known[i] : fraction_of_turn(kTurnsPerRadian * exp2(i * log2_step));
  }
};

inline const Rotation& rotation(double theta, int half) {
  thread_local Rotation last;
  thread_local double of_theta = 0;
  thread_local int of_half = 0;
  if (theta != of_theta || half != of_half) {
    last.log2_step = -std::log2(theta) / std::max(half, 1);
    for (int i = 0; i < Rotation::kKnown; ++i)
      last.known[i] = i < half ? fraction_of_turn(kTurnsPerRadian * std::pow(theta, -double(i) / half)) : 0;
    of_theta = theta, of_half = half;
  }
  return last;
}

// Turns a pair by a 64-bit fraction of a turn.
__device__ __forceinline__ void turn_pair(int64_t turn, float& a, float& b) {
  constexpr float kRadians = 3.4061215800304745e-19f;  // 2 pi / 2^64
  const int64_t quarter = ((turn >> 61) + 1) >> 1;     // the nearest, -2..2
  const float x = float(int64_t(uint64_t(turn) - (uint64_t(quarter) << 62))) * kRadians;  // at most pi / 4
  const float y = x * x;
  float sin = x + x * y * (-1.6666654611e-1f + y * (8.3321608736e-3f + y * -1.9515295891e-4f));
  float cos = 1.0f - 0.5f * y +
              y * y * (4.166664568298827e-2f + y * (-1.388731625493765e-3f + y * 2.443315711809948e-5f));
  if (quarter & 1) {
    const float swap = sin;
    sin = cos, cos = swap;
  }
  if ((quarter + 1) & 2) cos = -cos;
  if (quarter & 2) sin = -sin;
  const float turned = a * cos - b * sin;
  b = b * cos + a * sin;
  a = turned;
}

__device__ __forceinline__ int64_t load_position(const void* positions, int dtype, int64_t at) {
  return dtype ? static_cast<const int*>(positions)[at] : static_cast<const int64_t*>(positions)[at];
}

}  // namespace mor
