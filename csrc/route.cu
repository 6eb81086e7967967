// Routing forward in one launch: logit = x . w / temperature, the k largest logits of a sequence, and their rows.
//
// The work on a sequence is a number of items, a block each: rows to score, then slots to copy. A sequence's rows are
// copied `lag` sequences after they were scored, while they are still in the L2 cache. The block that scores a
// sequence's last rows, as a counter tells, also chooses, and hands each kept position on as a word of memory that is 0
// until then: a block that copies reads its words until they are there. Blocks start in the order of their numbers, so
// nothing ever waits for what no block works on.
//
// The threshold of a choice is found two bits at a time, by counting how many keys reach each of three numbers; what is
// above it is kept, and of what is at it as many as are wanted, from the lowest position on.
#include "common.cuh"

namespace mor {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 2;               // of a warp, at once
constexpr int kItemRows = kWarps * kRows;
constexpr int kReadyRows = 4 * kThreads;  // of an item, where logits are ready
constexpr int kKeys = 16384;           // of a sequence, in shared memory; of longer ones they are read each time
constexpr int kChunk = 4 * kThreads;   // keys
constexpr int kUnroll = 4;             // 16-byte loads a lane and row

struct Params {
  const void *x, *weight;
  const float* ready;
  const int64_t* candidates;
  const void* seqlens;
  const int64_t* recorded;
  void* rows;
  int64_t* indices;
  float *gates, *logits;
  int *counts, *scored_items, *slots;  // slots[j] is the position kept there + 1, -1 for none, 0 as long as that is open
  int64_t x_b, x_n, x_d;
  int batch, length, scored, k, width, seqlens_dtype;
  int score_items, copy_items, lag, item_rows;
  float alpha, temperature, largest;  // largest number of the dtype in which scores are ranked, 0 to rank logits
  int activation;
};

struct alignas(16) Shared {
  int counts[2][3][kWarps];  // every other time, so that one barrier a time is enough
  bool complete;
};

static_assert(kWarps == 8);  // sums of counts read 4 at a time, twice

// Position of candidate i of a sequence, -1 for none.
__device__ __forceinline__ int candidate(const Params& p, int b, int i) {
  int64_t position = i;
  if (i >= p.scored) return -1;
  if (p.candidates) position = __ldg(p.candidates + int64_t(b) * p.scored + i);
  int64_t end = p.length;
  if (p.seqlens) {
    const int64_t own = p.seqlens_dtype ? __ldg(static_cast<const int*>(p.seqlens) + b)
                                        : __ldg(static_cast<const int64_t*>(p.seqlens) + b);
    end = own < end ? own : end;
  }
  return position >= 0 && position < end ? int(position) : -1;
}

__device__ __forceinline__ float gate_of(const Params& p, float logit) {
  return isnan(logit) ? 0.0f : bounded(p.alpha * activate(logit, p.activation));
}

// A number that ranks as the logit does, or as its score rounded to T; 0 for what is never kept.
template <class T>
__device__ __forceinline__ unsigned key_of(const Params& p, float logit) {
  if (p.largest > 0) logit = bounded(to_float(from_float<T>(p.alpha * activate(logit, p.activation))), p.largest);
  if (isnan(logit)) return 0;
  const unsigned bits = __float_as_uint(logit == 0 ? 0.0f : logit);  // -0.0 ranks as 0.0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The sums of three counts over the block; `turn` is another one each time.
__device__ __forceinline__ void sum_counts(Shared& s, int turn, int& a, int& b, int& c) {
  const int warp = threadIdx.x / kWarp;
  a = __reduce_add_sync(kAll, a), b = __reduce_add_sync(kAll, b), c = __reduce_add_sync(kAll, c);
  int(&counts)[3][kWarps] = s.counts[turn % 2];
  if (threadIdx.x % kWarp == 0) counts[0][warp] = a, counts[1][warp] = b, counts[2][warp] = c;
  __syncthreads();
  const auto sum = [](const int(&of)[kWarps]) {
    const int4 low = *reinterpret_cast<const int4*>(of), high = *reinterpret_cast<const int4*>(of + 4);
    return low.x + low.y + low.z + low.w + high.x + high.y + high.z + high.w;
  };
  a = sum(counts[0]), b = sum(counts[1]), c = sum(counts[2]);
}

// The choice of a sequence; its keys are in shared memory, with zeros up to a multiple of 4 a thread, if kCached.
template <class T, bool kCached>
__device__ void choose(const Params& p, Shared& s, uint4* keys, int b) {
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  const float* logits = p.logits + int64_t(b) * p.scored;
  const auto key_at = [&](int i) { return candidate(p, b, i) < 0 ? 0u : key_of<T>(p, __ldcg(logits + i)); };
  int turn = 0, real = 0, none = 0;
  if constexpr (kCached) {
#pragma unroll 2
    for (int i = t; i < ceil_div(p.scored, kChunk) * kThreads; i += kThreads) {
      const uint4 four{key_at(4 * i), key_at(4 * i + 1), key_at(4 * i + 2), key_at(4 * i + 3)};
      keys[i] = four;
      real += (four.x != 0) + (four.y != 0) + (four.z != 0) + (four.w != 0);
    }
  } else {
#pragma unroll 4
    for (int i = t; i < p.scored; i += kThreads) real += key_at(i) != 0;
  }
  sum_counts(s, turn++, real, none, none);
  const int kept = min(p.k, real);

  // the largest number that `kept` keys reach, or one that exactly so many reach if found earlier
  unsigned threshold = 0;
  int reached = real;  // by how many keys
  for (int shift = 30; shift >= 0 && reached != kept; shift -= 2) {
    const unsigned one = threshold + (1u << shift), two = one + (1u << shift), three = two + (1u << shift);
    int reach_one = 0, reach_two = 0, reach_three = 0;
    const auto count = [&](unsigned key) { reach_one += key >= one, reach_two += key >= two, reach_three += key >= three; };
    if constexpr (kCached) {
#pragma unroll 2
      for (int i = t; i < ceil_div(p.scored, kChunk) * kThreads; i += kThreads) {
        const uint4 four = keys[i];
        count(four.x), count(four.y), count(four.z), count(four.w);
      }
    } else {
#pragma unroll 4
      for (int i = t; i < p.scored; i += kThreads) count(key_at(i));
    }
    sum_counts(s, turn++, reach_one, reach_two, reach_three);
    if (reach_one >= kept) threshold = one, reached = reach_one;
    if (reach_two >= kept) threshold = two, reached = reach_two;
    if (reach_three >= kept) threshold = three, reached = reach_three;
  }
  threshold = max(threshold, 1u);  // 0 is no key

  // each warp writes the kept of a stretch, from the slot on that those of stretches before it leave
  const int stretch = ceil_div(p.scored, kChunk) * kChunk / kWarps;
  const int begin = warp * stretch, end = kept ? min(begin + stretch, p.scored) : begin;
  const auto own_key = [&](int i) {
    if constexpr (kCached) return reinterpret_cast<const unsigned*>(keys)[i]; else return key_at(i);
  };
  int above = 0, tied = 0;
#pragma unroll 4
  for (int i = begin + lane; i - lane < end; i += kWarp) {
    const unsigned key = own_key(i);
    above += key > threshold, tied += key == threshold;
  }
  above = __reduce_add_sync(kAll, above), tied = __reduce_add_sync(kAll, tied);
  int(&counts)[3][kWarps] = s.counts[turn % 2];
  if (lane == 0) counts[0][warp] = above, counts[1][warp] = tied;
  __syncthreads();
  int want = kept;  // of what is at the threshold
  above = tied = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    want -= counts[0][other];
    if (other < warp) above += counts[0][other], tied += counts[1][other];
  }
  const int64_t row = int64_t(b) * p.k;
  const unsigned lower = (1u << lane) - 1;
#pragma unroll 4
  for (int first = begin; first < end; first += kWarp) {
    const int i = first + lane;
    const unsigned key = own_key(i);
    const int position = candidate(p, b, i);
    const unsigned all_above = __ballot_sync(kAll, key > threshold), all_tied = __ballot_sync(kAll, key == threshold);
    const int tie = tied + __popc(all_tied & lower);
    if (key > threshold || (key == threshold && tie < want)) {
      const int j = above + __popc(all_above & lower) + min(tie, want);
      __stcg(p.slots + row + j, position + 1);
      p.indices[row + j] = position;
      p.gates[row + j] = gate_of(p, p.largest > 0 ? __ldcg(logits + i) : logit_of(key));
    }
    above += __popc(all_above), tied += __popc(all_tied);
  }
  for (int j = kept + t; j < p.k; j += kThreads) {
    __stcg(p.slots + row + j, -1);
    p.indices[row + j] = -1;
    p.gates[row + j] = 0;
  }
  if (t == 0) p.counts[b] = kept;
}

// A recorded choice; what is no candidate counts as none.
__device__ void repeat(const Params& p, Shared& s, int b) {
  const int64_t row = int64_t(b) * p.k;
  int kept = 0, none = 0;
  for (int j = threadIdx.x; j < p.k; j += kThreads) {
    const int64_t index = p.recorded[row + j];
    int64_t i = index >= 0 && index < p.length ? index : -1;
    if (i >= 0 && p.candidates) i = find(p.candidates + int64_t(b) * p.scored, index, p.scored);
    if (i >= 0 && candidate(p, b, int(i)) < 0) i = -1;
    __stcg(p.slots + row + j, i >= 0 ? int(index) + 1 : -1);
    p.indices[row + j] = i >= 0 ? index : -1;
    p.gates[row + j] = i >= 0 ? gate_of(p, __ldcg(p.logits + int64_t(b) * p.scored + i)) : 0.0f;
    kept += i >= 0;
  }
  sum_counts(s, 0, kept, none, none);
  if (threadIdx.x == 0) p.counts[b] = kept;
}

template <class W, int N>
__device__ __forceinline__ void load_weights(const W* from, float (&w)[N]) {
  constexpr int kPart = kWide<W>;
#pragma unroll
  for (int part = 0; part < N / kPart; ++part) {
    const int4 bits = __ldg(reinterpret_cast<const int4*>(from) + part);
    const auto& values = reinterpret_cast<const Pack<W, kPart>&>(bits);
#pragma unroll
    for (int e = 0; e < kPart; ++e) w[part * kPart + e] = to_float(values.at[e]);
  }
}

template <class T, class W, bool kAligned>
__device__ void score(const Params& p, int b, int first) {
  const int lane = threadIdx.x % kWarp;
  if (p.ready) {
    for (int i = first + threadIdx.x; i < min(first + kReadyRows, p.scored); i += kThreads) {
      const int64_t at = int64_t(b) * p.scored + i;
      p.logits[at] = candidate(p, b, i) < 0 ? 0.0f : bounded(__fdiv_rn(p.ready[at], p.temperature));
    }
    return;
  }
  first += threadIdx.x / kWarp * kRows;
  const T* x = static_cast<const T*>(p.x) + b * p.x_b;
  const W* w = static_cast<const W*>(p.weight);
  float sum[kRows] = {};
  int position[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) position[r] = candidate(p, b, first + r);
  if constexpr (kAligned) {
    constexpr int kPack = kWide<T>;
    const int packs = p.width / kPack;
    for (int start = lane; start < packs; start += kUnroll * kWarp) {
      int4 bits[kRows][kUnroll];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = start + u * kWarp;
          bits[r][u] = int4{};
          if (position[r] >= 0 && c < packs)
            bits[r][u] = load_through(reinterpret_cast<const int4*>(x + position[r] * p.x_n) + c);
        }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = start + u * kWarp;
        if (c >= packs) break;
        float weights[kPack];
        load_weights(w + c * kPack, weights);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const auto& values = reinterpret_cast<const Pack<T, kPack>&>(bits[r][u]);
#pragma unroll
          for (int e = 0; e < kPack; ++e) sum[r] += to_float(values.at[e]) * weights[e];
        }
      }
    }
  } else {
    for (int d = lane; d < p.width; d += kWarp) {
      const float weight = to_float(w[d]);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (position[r] >= 0) sum[r] += to_float(x[position[r] * p.x_n + d * p.x_d]) * weight;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sum[r] = warp_sum(sum[r]);
    const float logit = position[r] < 0 ? 0.0f : bounded(__fdiv_rn(sum[r], p.temperature));
    if (lane == 0 && first + r < p.scored) p.logits[int64_t(b) * p.scored + first + r] = logit;
  }
}

template <class T, bool kAligned>
__device__ void copy(const Params& p, int b, int first) {
  const int lane = threadIdx.x % kWarp;
  first += threadIdx.x / kWarp * kRows;
  const int here = min(kRows, p.k - first);
  int slot = 0;
  if (lane < here) {
    const volatile int* word = p.slots + int64_t(b) * p.k + first + lane;
    while ((slot = *word) == 0) __nanosleep(32);
  }
  const T* x = static_cast<const T*>(p.x) + b * p.x_b;
  T* rows = static_cast<T*>(p.rows) + (int64_t(b) * p.k + first) * p.width;
  int position[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) position[r] = __shfl_sync(kAll, slot, r) - 1;
  if constexpr (kAligned) {
    const int packs = p.width / kWide<T>;
    for (int start = lane; start < packs; start += kUnroll * kWarp) {
      int4 bits[kRows][kUnroll];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = start + u * kWarp;
          bits[r][u] = int4{};
          if (position[r] >= 0 && c < packs) bits[r][u] = __ldcs(reinterpret_cast<const int4*>(x + position[r] * p.x_n) + c);
        }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = start + u * kWarp;
          if (r < here && c < packs) __stcs(reinterpret_cast<int4*>(rows + int64_t(r) * p.width) + c, bits[r][u]);
        }
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < here) copy_row<T, 1>(x + position[r] * p.x_n, p.x_d, rows + int64_t(r) * p.width, position[r] >= 0, p.width);
  }
}

template <class T, class W, bool kAligned>
__global__ void __launch_bounds__(kThreads, 4) route_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 keys[];
  __shared__ Shared s;
  const int per_step = p.score_items + p.copy_items;
  const int step = blockIdx.x / per_step, item = blockIdx.x % per_step;
  if (item >= p.score_items) {
    if (step >= p.lag) copy<T, kAligned>(p, step - p.lag, (item - p.score_items) * kItemRows);
    return;
  }
  if (step >= p.batch) return;
  score<T, W, kAligned>(p, step, item * p.item_rows);
  __syncthreads();
  if (threadIdx.x == 0) s.complete = add_acq_rel(p.scored_items + step, 1) == p.score_items - 1;
  __syncthreads();
  if (!s.complete) return;
  if (p.recorded) repeat(p, s, step);
  else if (p.scored <= kKeys) choose<T, true>(p, s, keys, step);
  else choose<T, false>(p, s, keys, step);
}

}  // namespace

void route(Address x, Address weight, Address ready, Address candidates, Address seqlens, Address recorded,
           Address rows, Address indices, Address gates, Address logits, Address counts, Address workspace,
           int batch, int length, int scored, int k, int width, int64_t x_b, int64_t x_n, int64_t x_d,
           int seqlens_dtype, int activation, double alpha, double temperature, double largest, int64_t in_flight,
           int dtype, int weight_dtype, Address stream) {
  Params p{};
  p.x = pointer<void>(x), p.weight = pointer<void>(weight), p.ready = pointer<float>(ready);
  p.candidates = pointer<int64_t>(candidates), p.seqlens = pointer<void>(seqlens);
  p.recorded = pointer<int64_t>(recorded), p.rows = pointer<void>(rows), p.indices = pointer<int64_t>(indices);
  p.gates = pointer<float>(gates), p.logits = pointer<float>(logits), p.counts = pointer<int>(counts);
  p.scored_items = pointer<int>(workspace), p.slots = p.scored_items + batch;
  p.x_b = x_b, p.x_n = x_n, p.x_d = x_d;
  p.batch = batch, p.length = length, p.scored = scored, p.k = k, p.width = width;
  p.seqlens_dtype = seqlens_dtype;
  p.alpha = alpha, p.temperature = temperature, p.largest = largest, p.activation = activation;
  p.item_rows = ready ? kReadyRows : kItemRows;
  p.score_items = ceil_div(scored, p.item_rows);
  p.copy_items = ceil_div(k, kItemRows);
  const int keys = scored <= kKeys && !recorded ? ceil_div(scored, kChunk) * kChunk * int(sizeof(unsigned)) : 0;
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t each = std::max<int64_t>((int64_t(scored) + k) * width * sizeof(T), 1);
    p.lag = std::min<int64_t>(std::max<int64_t>(in_flight / each, 1), batch - 1);
    const int64_t blocks = int64_t(batch + p.lag) * (p.score_items + p.copy_items);
    const bool wide = x_d == 1 && aligned<T>({x, rows, weight}, {x_b, x_n, width});
    const auto launch = [&](auto kernel) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, keys), "route");
      kernel<<<blocks, kThreads, keys, stream_of(stream)>>>(p);
    };
    if (weight_dtype == dtype || ready) {
      launch(wide ? route_kernel<T, T, true> : route_kernel<T, T, false>);
    } else if (weight_dtype == kF32) {
      launch(wide ? route_kernel<T, float, true> : route_kernel<T, float, false>);
    } else {
      throw std::invalid_argument("weight: expected float32 or the dtype of x");
    }
  });
  check_launch("route");
}

}  // namespace mor
