// Rotary embedding of queries, and keys, at the speed of memory: a thread turns a few pairs of some heads, of which the
// first halves lie side by side, and the second. The backward turns by the negative angle.
#include "rotary.cuh"

namespace mor {
namespace {

constexpr int kThreads = 256;
constexpr int kManyHeads = 4;

struct Heads {
  const void* x;
  void* out;
  int64_t x_b, x_n, x_h;
  int count;
};

struct Params {
  Heads q, k;
  const void* positions;
  Work<kThreads> work;
  int64_t length, p_b, p_n;
  int half, positions_dtype, direction;
  double log2_step;
};

// Token b * length + n stands at (b, n).
template <class T, int N, int kHeads>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ Params p) {
  __shared__ Frequencies frequencies;
  take_over();
  const Task task(p.work);
  const int64_t token = task.token, b = p.work.tokens == p.length ? 0 : token / p.length, n = token - b * p.length;
  const bool there = task.there;
  const int q_shares = ceil_div(p.q.count, kHeads), i = task.piece * N, share = task.share;
  const Heads& heads = share < q_shares ? p.q : p.k;
  const int first = (share < q_shares ? share : share - q_shares) * kHeads;
  const T* x = static_cast<const T*>(heads.x) + b * heads.x_b + n * heads.x_n + first * heads.x_h;
  T* out = static_cast<T*>(heads.out) + (token * heads.count + first) * 2 * p.half;
  int64_t position = 0;
  if (there) position = load_position(p.positions, p.positions_dtype, b * p.p_b + n * p.p_n) * p.direction;
  Held<T, N> low[kHeads], high[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (there && first + h < heads.count) {
      low[h] = load_held<T, N>(x + h * heads.x_h, i, 1);
      high[h] = load_held<T, N>(x + h * heads.x_h, i + p.half, 1);
    }
  frequencies.fill(p.half, p.log2_step);  // while the loads are under way
  if (!there) return;
  float cos[N], sin[N];
  angles(frequencies, p.log2_step, i, position, cos, sin);
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (first + h < heads.count) {
      float a[N], b[N];
      to_floats<T>(low[h], a), to_floats<T>(high[h], b);
      turn_pairs(cos, sin, a, b);
      store_held(out + h * 2 * p.half, i, 1, from_floats<T>(a));
      store_held(out + h * 2 * p.half, i + p.half, 1, from_floats<T>(b));
    }
}

}  // namespace

void rope(Address q, Address k, Address positions, Address out_q, Address out_k, int64_t batch, int64_t length,
          int q_heads, int k_heads, int half, double theta, bool inverse, int64_t p_b, int64_t p_n, int64_t q_b,
          int64_t q_n, int64_t q_h, int64_t k_b, int64_t k_n, int64_t k_h, int positions_dtype, int dtype,
          Address stream) {
  Params p{{pointer<void>(q), pointer<void>(out_q), q_b, q_n, q_h, q_heads},
           {pointer<void>(k), pointer<void>(out_k), k_b, k_n, k_h, k_heads}, pointer<void>(positions),
           {batch * length, 1, 1}, length, p_b, p_n, half, positions_dtype, inverse ? -1 : 1, log2_step(theta, half)};
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool wide = aligned<T>({q, k, out_q, out_k}, {q_b, q_n, q_h, k_b, k_n, k_h, half});
    const int pieces = wide ? half / kWide<T> : half;
    const auto run = [&](auto kernel, int heads) {
      p.work = {p.work.tokens, ceil_div(q_heads, heads) + ceil_div(k_heads, heads), pieces};
      launch(kernel, p.work.grid(), kThreads, 0, true, stream, p);
    };
    // angles are worked out for several heads at once, if that leaves enough threads
    const bool many = p.work.tokens * (q_heads + k_heads) * pieces > int64_t(device().multiprocessors) * kThreads * 16;
    if (!wide) run(rope_kernel<T, 1, 1>, 1);
    else if (many) run(rope_kernel<T, kWide<T>, kManyHeads>, kManyHeads);
    else run(rope_kernel<T, kWide<T>, 1>, 1);
  });
}

}  // namespace mor
