// Rotary embedding of queries, and keys, at the speed of memory: a thread turns a few pairs of a head, of which the first
// halves lie side by side, and the second. The backward turns by the negative angle.
#include "rotary.cuh"

namespace mor {
namespace {

constexpr int kThreads = 256;

struct Heads {
  const void* x;
  void* out;
  int64_t x_b, x_n, x_h;
  int count;
};

struct Params {
  Heads q, k;
  const void* positions;
  int64_t tokens, length, p_b, p_n;
  int half, positions_dtype, direction;
  Rotation rotation;
};

// Token b * length + n stands at (b, n).
template <class T, int N>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ Params p) {
  const int pieces = p.half / N;  // of a head
  const int64_t each = int64_t(p.q.count + p.k.count) * pieces;
  const int64_t id = int64_t(blockIdx.x) * kThreads + threadIdx.x, token = id / each;
  if (token >= p.tokens) return;
  const int64_t b = token / p.length, n = token % p.length;
  int head = id % each / pieces;
  const int i = id % pieces * N;
  const Heads& heads = head < p.q.count ? p.q : p.k;
  if (head >= p.q.count) head -= p.q.count;
  const T* x = static_cast<const T*>(heads.x) + b * heads.x_b + n * heads.x_n + head * heads.x_h;
  T* out = static_cast<T*>(heads.out) + (token * heads.count + head) * 2 * p.half;
  float first[N], second[N];
  to_floats<T>(load_held<T, N>(x, i, 1), first);
  to_floats<T>(load_held<T, N>(x, i + p.half, 1), second);
  const int64_t position = load_position(p.positions, p.positions_dtype, b * p.p_b + n * p.p_n) * p.direction;
#pragma unroll
  for (int e = 0; e < N; ++e)
    turn_pair(int64_t(uint64_t(position) * uint64_t(p.rotation.frequency(i + e))), first[e], second[e]);
  store_held(out, i, 1, from_floats<T>(first));
  store_held(out, i + p.half, 1, from_floats<T>(second));
}

}  // namespace

void rope(Address q, Address k, Address positions, Address out_q, Address out_k, int64_t batch, int64_t length,
          int q_heads, int k_heads, int half, double theta, bool inverse, int64_t p_b, int64_t p_n, int64_t q_b,
          int64_t q_n, int64_t q_h, int64_t k_b, int64_t k_n, int64_t k_h, int positions_dtype, int dtype,
          Address stream) {
  const Params p{{pointer<void>(q), pointer<void>(out_q), q_b, q_n, q_h, q_heads},
                 {pointer<void>(k), pointer<void>(out_k), k_b, k_n, k_h, k_heads},
                 pointer<void>(positions), batch * length, length, p_b, p_n, half, positions_dtype, inverse ? -1 : 1,
                 rotation(theta, half)};
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool wide = aligned<T>({q, k, out_q, out_k}, {q_b, q_n, q_h, k_b, k_n, k_h, half});
    const int64_t threads = p.tokens * (q_heads + k_heads) * (wide ? half / kWide<T> : half);
    auto kernel = wide ? rope_kernel<T, kWide<T>> : rope_kernel<T, 1>;
    kernel<<<ceil_div<int64_t>(threads, kThreads), kThreads, 0, stream_of(stream)>>>(p);
  });
  check_launch("rope");
}

}  // namespace mor
