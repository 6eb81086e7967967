// The end of a recursion while decoding: a block a token. The gate depends on the score that the call before left, not
// on the row, so a row is read, combined, written and scored in one pass, some of it at a time.
#include "common.cuh"

namespace mor {
namespace {

constexpr int kThreads = 256;  // of a block at the most
constexpr int kBatch = 2;      // packs of a row that a thread has on their way at once

struct Params {
  void* x;
  const void *update, *weight, *aux_weight;
  float* logits;
  const int64_t *recursions, *last;
  const bool* replayed;
  bool* goes_on;
  int64_t routers, x_n, x_d, f_n, f_d, logits_n;
  int width, update_dtype, weight_dtype, aux_dtype, activation, residual;
  float alpha, temperature;
};

__device__ __forceinline__ float combine(float x, float f, float gate, int residual) {
  if (residual == kBlock) return x + gate * f;
  return residual == kDelta ? x + gate * (f - x) : gate * f;
}

template <class T>
__device__ __forceinline__ float element(const int4& pack, int i) {
  return to_float(reinterpret_cast<const Pack<T, kWide<T>>&>(pack).at[i]);
}

// Packed: rows of x, update and the weights are of T and can be read 16 bytes at a time.
template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads, 2) depth_step_kernel(const __grid_constant__ Params p) {
  __shared__ float sums[2][kThreads / kWarp];
  take_over();
  const int64_t row = blockIdx.x;
  T* x = static_cast<T*>(p.x) + row * p.x_n;
  constexpr int kPack = kWide<T>;
  int4* state = reinterpret_cast<int4*>(x);
  const int4* update = reinterpret_cast<const int4*>(static_cast<const T*>(p.update) + row * p.f_n);
  const int packs = kPacked ? p.width / kPack : 0, step = blockDim.x;
  int4 old[kBatch], f[kBatch], w[kBatch]{}, a[kBatch]{};
  const auto load_row = [&](int first) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int c = first + b * step;
      if (c < packs) old[b] = state[c], f[b] = update[c];
    }
  };
  load_row(threadIdx.x);  // a lane of padding has a row as well, so that this waits for nothing
  __syncwarp();           // or the compiler would have it wait for the recursion

  const int64_t recursion = p.recursions[row];
  const float logit = p.logits[row * p.logits_n];
  const int64_t last = p.last ? p.last[row] : p.routers;
  const bool replayed = p.replayed && p.replayed[row];
  const bool there = recursion >= 0 && recursion < p.routers;
  const int64_t following = recursion + 1;
  const bool scored = there && following < p.routers;
  const bool reads_aux = scored && p.aux_weight;
  const int4* weight = static_cast<const int4*>(p.weight) + following * packs;
  const int4* aux_weight = static_cast<const int4*>(p.aux_weight) + following * packs;
  const auto load_weights = [&](int first) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int c = first + b * step;
      if (c < packs && scored) w[b] = weight[c];
      if (c < packs && reads_aux) a[b] = aux_weight[c];
    }
  };
  load_weights(threadIdx.x);
  const float gate = isnan(logit) ? 0.0f : bounded(p.alpha * activate(bounded(logit), p.activation));
  float own = 0, aux = 0;
  for (int first = threadIdx.x; first < packs; first += kBatch * step) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int c = first + b * step;
      if (c >= packs || !there) continue;
      Pack<T, kPack> next;
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        next.at[e] = from_float<T>(combine(element<T>(old[b], e), element<T>(f[b], e), gate, p.residual));
        own += to_float(next.at[e]) * element<T>(w[b], e);
        aux += to_float(next.at[e]) * element<T>(a[b], e);
      }
      state[c] = *reinterpret_cast<const int4*>(&next);
    }
    load_row(first + kBatch * step);
    load_weights(first + kBatch * step);
  }
  if constexpr (!kPacked) {
    for (int d = threadIdx.x; there && d < p.width; d += step) {
      const float f = load_any(p.update, p.update_dtype, row * p.f_n + d * p.f_d);
      const T next = from_float<T>(combine(to_float(x[d * p.x_d]), f, gate, p.residual));
      x[d * p.x_d] = next;
      if (scored) own += to_float(next) * load_any(p.weight, p.weight_dtype, following * p.width + d);
      if (reads_aux) aux += to_float(next) * load_any(p.aux_weight, p.aux_dtype, following * p.width + d);
    }
  }

  own = warp_sum(own), aux = warp_sum(aux);
  if (threadIdx.x % kWarp == 0) sums[0][threadIdx.x / kWarp] = own, sums[1][threadIdx.x / kWarp] = aux;
  __syncthreads();
  if (threadIdx.x) return;
  own = aux = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp)
    if (warp < blockDim.x / kWarp) own += sums[0][warp], aux += sums[1][warp];
  const float score = __fdiv_rn(own, p.temperature);
  const bool wanted = p.aux_weight ? __fdiv_rn(aux, p.temperature) > 0 && !isnan(score) : score > 0;
  if (scored) p.logits[row * p.logits_n] = score;
  p.goes_on[row] = scored && following < last && (wanted || replayed);
}

}  // namespace

void depth_step(Address x, Address update, Address logits, Address recursions, Address weight, Address last,
                Address replayed, Address aux_weight, Address goes_on, int64_t n, int64_t routers, int width,
                int64_t x_n, int64_t x_d, int64_t f_n, int64_t f_d, int64_t logits_n, int activation, double alpha,
                double temperature, int residual, int dtype, int update_dtype, int weight_dtype, int aux_dtype,
                Address stream) {
  Params p{pointer<void>(x), pointer<void>(update), pointer<void>(weight), pointer<void>(aux_weight),
           pointer<float>(logits), pointer<int64_t>(recursions), pointer<int64_t>(last), pointer<bool>(replayed),
           pointer<bool>(goes_on), routers, x_n, x_d, f_n, f_d, logits_n, width, update_dtype, weight_dtype, aux_dtype,
           activation, residual, float(alpha), float(temperature)};
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const bool packed = x_d == 1 && f_d == 1 && update_dtype == dtype && weight_dtype == dtype &&
                        (!aux_weight || aux_dtype == dtype) &&
                        aligned<T>({x, update, weight, aux_weight}, {x_n, f_n, width});
    const int items = packed ? width / kWide<T> : width;
    const int threads = std::min(kThreads, std::max(ceil_div(items, kWarp), 1) * kWarp);
    auto kernel = packed ? depth_step_kernel<T, true> : depth_step_kernel<T, false>;
    launch(kernel, n, threads, 0, true, stream, p);
  });
}

}  // namespace mor
