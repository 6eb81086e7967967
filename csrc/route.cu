// Routing forward in one launch: logit = x . w / temperature, the k largest logits of a sequence, and their rows.
//
// The work on a sequence is a number of items, a block each: rows to score, the choice, and slots to copy. A sequence's
// rows are copied `lag` sequences after they were scored, while they are still in the L2 cache. Scores and kept
// candidates are handed on as words of memory that are kEmpty until they are written: who needs one reads it until it
// is there, so that they need neither fences nor counters, which would cost as much as the rows. Blocks start in the
// order of their numbers, so nothing ever waits for what no block works on.
//
// The k-th largest key is found by a histogram of the keys' upper 11 bits, then of the next 11 of those that share these,
// then of the last 10. What is above it is kept, and of what is at it as many as are wanted, from the lowest position
// on. Keys of a sequence with too many of them to hold are worked out each time.
#include "instructions.cuh"

namespace mor {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kKeys = 8192;  // of a sequence, in shared memory
constexpr int kBlocks = 4;   // of a multiprocessor
constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kUnroll = 4;  // 16-byte loads a lane and row
constexpr int kEmpty = -1;  // as fp32 a NaN that no logit is
constexpr int kNone = -2;   // for what isn't kept
constexpr int kNaN = 0x7fc00000;

struct Params {
  const void *x, *weight;
  const float* ready;
  const int64_t* candidates;
  const void* seqlens;
  const int64_t* recorded;
  void* rows;
  int64_t* indices;
  float* gates;
  int *words, *slots, *counts;  // bits of the logits; candidates kept
  int64_t x_b, x_n, x_d;
  int batch, length, scored, k, width, seqlens_dtype;
  int score_items, copy_items, lag;
  float alpha, temperature, largest;  // largest number of the dtype in which scores are ranked, 0 to rank logits
  int activation;
  int weight_dtype;
};

struct alignas(16) Shared {
  int histogram[kBins];
  int sums[kWarps], above[kWarps], tied[kWarps], bin, before, count;
};

// A sequence: its candidates, where they aren't all positions, and the end of its tokens.
struct Sequence {
  const int64_t* candidates;
  int scored, end;

  __device__ Sequence(const Params& p, int b) : candidates(nullptr), scored(p.scored), end(p.length) {
    if (p.candidates) candidates = p.candidates + int64_t(b) * p.scored;
    if (p.seqlens) {
      const int64_t own = p.seqlens_dtype ? __ldg(static_cast<const int*>(p.seqlens) + b)
                                          : __ldg(static_cast<const int64_t*>(p.seqlens) + b);
      end = own < end ? int(max(own, int64_t(0))) : end;
    }
  }
  // position of candidate i, -1 for none
  __device__ int position(int i) const {
    int64_t at = i;
    if (i >= scored) return -1;
    if (candidates) at = __ldg(candidates + i);
    return at >= 0 && at < end ? int(at) : -1;
  }
};

__device__ __forceinline__ int look(const int* at) { return *static_cast<const volatile int*>(at); }

// The word, once it is written.
__device__ __forceinline__ int await(const int* at) {
  int word;
  while ((word = look(at)) == kEmpty) {}
  return word;
}

__device__ __forceinline__ void hand_on(int* word, float logit) {
  __stcg(word, isnan(logit) ? kNaN : __float_as_int(logit));
}

// What needs exponentials isn't inlined: the code of a choice runs seldom and is fetched each time.

__device__ __noinline__ float score_of(float logit, float alpha, int activation) {
  return alpha * activate(logit, activation);
}

__device__ __forceinline__ float gate_of(const Params& p, float logit) {
  return isnan(logit) ? 0.0f : bounded(score_of(logit, p.alpha, p.activation));
}

template <class T>
__device__ __noinline__ int rounded_score(int word, float alpha, int activation, float largest) {
  return __float_as_int(bounded(to_float(from_float<T>(score_of(__int_as_float(word), alpha, activation))), largest));
}

// A number that ranks as the logit does, or as its score rounded to T; 0 for NaN, which is never kept.
template <class T>
__device__ __forceinline__ unsigned key_of(const Params& p, int word) {
  if (p.largest > 0) word = rounded_score<T>(word, p.alpha, p.activation, p.largest);
  const unsigned bits = word == int(0x80000000) ? 0 : word;  // -0.0 ranks as 0.0
  return isnan(__int_as_float(word)) ? 0 : bits ^ (0x80000000u | -(bits >> 31));
}

// Finds the bin in which the want-th of the histogram's keys is, from the highest down, if there are so many, and leaves
// zeros. Returns how many keys there are.
__device__ __forceinline__ int find_bin(Shared& s, int want) {
  constexpr int kEach = kBins / kThreads;
  static_assert(kEach == 8 && kWarps == 8);
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp, highest = kBins - 1 - t * kEach;
  int4* bins = reinterpret_cast<int4*>(s.histogram + highest + 1 - kEach);
  const int4 low = bins[0], high = bins[1];
  bins[0] = bins[1] = int4{};
  const int own[kEach] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
  const int sum = low.x + low.y + low.z + low.w + high.x + high.y + high.z + high.w;
  int before = sum;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAll, before, step);
    if (lane >= step) before += other;
  }
  if (lane == kWarp - 1) s.sums[warp] = before;
  before -= sum;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    before += other < warp ? s.sums[other] : 0;
    total += s.sums[other];
  }
  if (before < want && before + sum >= want) {
    int o = 0;
#pragma unroll
    for (int next = 0; next < kEach - 1; ++next)
      if (o == next && before + own[next] < want) before += own[next], ++o;
    s.bin = highest - o, s.before = before;
    s.count = own[0];
#pragma unroll
    for (int other = 1; other < kEach; ++other)
      if (o == other) s.count = own[other];
  }
  __syncthreads();
  return total;
}

// The choice of a sequence; its keys are in shared memory if kCached. Each warp has a stretch of candidates.
template <class T, bool kCached>
__device__ void choose(const Params& p, Shared& s, unsigned* keys, int b) {
  constexpr int kOwn = kCached ? 8 : 12;  // keys of a thread that are read at once; more would spill
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  const Sequence sequence(p, b);
  const int* words = p.words + int64_t(b) * p.scored;
  const int stretch = ceil_div(p.scored, kThreads) * kWarp;
  const int begin = min(warp * stretch, p.scored), end = min(begin + stretch, p.scored);
  const int readable = sequence.candidates ? end : min(end, sequence.end);
  // those of a lane at `first` and so on; NaN for what is no candidate, kEmpty for what isn't there yet
  const auto read = [&](int (&own)[kOwn], int first) {
#pragma unroll
    for (int o = 0; o < kOwn; ++o) own[o] = first + o * kWarp < readable ? look(words + first + o * kWarp) : kNaN;
    if (sequence.candidates) {
#pragma unroll
      for (int o = 0; o < kOwn; ++o)
        if (sequence.position(first + o * kWarp) < 0) own[o] = kNaN;
    }
  };
  // f(i, key) for all of the warp's, a lane each, kOwn at a time so that memory is waited for once
  const auto each_key = [&](auto f) {
    for (int first = begin + lane; first - lane < end; first += kOwn * kWarp) {
      int own[kOwn];
      if constexpr (kCached) {
#pragma unroll
        for (int o = 0; o < kOwn; ++o) own[o] = first + o * kWarp < end ? int(keys[first + o * kWarp]) : 0;
      } else {
        read(own, first);
      }
#pragma unroll
      for (int o = 0; o < kOwn; ++o) f(first + o * kWarp, kCached ? unsigned(own[o]) : key_of<T>(p, own[o]));
    }
  };
  for (int bin = t; bin < kBins; bin += kThreads) s.histogram[bin] = 0;
  __syncthreads();
  for (int first = begin + lane; first - lane < end; first += kOwn * kWarp) {
    int own[kOwn];
    for (bool missing = true; missing;) {
      read(own, first);
      missing = false;
#pragma unroll
      for (int o = 0; o < kOwn; ++o) missing |= own[o] == kEmpty;
    }
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const unsigned key = key_of<T>(p, own[o]);
      if (kCached && first + o * kWarp < end) keys[first + o * kWarp] = key;
      if (key) atomicAdd(&s.histogram[key >> (32 - kBinBits)], 1);
    }
  }

  // the largest number that `kept` keys reach, or one between it and the key below
  unsigned threshold = p.k ? 0 : ~0u;
  int kept = p.k;
  for (int shift = 32 - kBinBits, want = kept; kept;) {
    __syncthreads();
    const int total = find_bin(s, want);
    if (total <= want) {  // only at first
      kept = total;
      break;
    }
    threshold |= unsigned(s.bin) << shift, want -= s.before;
    if (s.count == want || !shift) break;  // all of the bin
    const int known = shift;
    shift = max(shift - kBinBits, 0);
    each_key([&](int, unsigned key) {
      if ((key ^ threshold) >> known == 0) atomicAdd(&s.histogram[key >> shift & (kBins - 1)], 1);
    });
  }
  threshold = max(threshold, 1u);  // 0 is no key

  int above = 0, tied = 0;
  each_key([&](int, unsigned key) { above += key > threshold, tied += key == threshold; });
  above = __reduce_add_sync(kAll, above), tied = __reduce_add_sync(kAll, tied);
  if (lane == 0) s.above[warp] = above, s.tied[warp] = tied;
  __syncthreads();
  int want = kept, ties = 0, slot = 0;  // of what is at the threshold; of the next that is kept
  tied = 0;                             // before the next
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    want -= s.above[other], ties += s.tied[other];
    if (other < warp) slot += s.above[other], tied += s.tied[other];
  }
  slot += min(tied, want);
  int* slots = p.slots + int64_t(b) * p.k;
  const unsigned lower = (1u << lane) - 1;
  each_key([&](int i, unsigned key) {
    bool is_kept = key >= threshold;
    if (ties > want) {  // the first of them
      const unsigned all = __ballot_sync(kAll, key == threshold);
      is_kept = key > threshold || (is_kept && tied + __popc(all & lower) < want);
      tied += __popc(all);
    }
    const unsigned all = __ballot_sync(kAll, is_kept);
    if (is_kept) __stcg(slots + slot + __popc(all & lower), i);
    slot += __popc(all);
  });
  for (int j = kept + t; j < p.k; j += kThreads) __stcg(slots + j, kNone);
  if (t == 0) p.counts[b] = kept;
}

// A recorded choice; what is no candidate counts as none.
__device__ void repeat(const Params& p, Shared& s, int b) {
  const int64_t row = int64_t(b) * p.k;
  const Sequence sequence(p, b);
  int kept = 0;
  for (int j = threadIdx.x; j < p.k; j += kThreads) {
    const int64_t index = p.recorded[row + j];
    int64_t i = index >= 0 && index < p.length ? index : -1;
    if (i >= 0 && p.candidates) i = find(sequence.candidates, index, p.scored);
    if (i >= 0 && sequence.position(int(i)) < 0) i = -1;
    __stcg(p.slots + row + j, i >= 0 ? int(i) : kNone);
    kept += i >= 0;
  }
  kept = __reduce_add_sync(kAll, kept);
  if (threadIdx.x % kWarp == 0) s.sums[threadIdx.x / kWarp] = kept;
  __syncthreads();
  if (threadIdx.x == 0) {
    kept = 0;
    for (int of_warp : s.sums) kept += of_warp;
    p.counts[b] = kept;
  }
}

__device__ void take_ready(const Params& p, int b) {
  const Sequence sequence(p, b);
  for (int i = threadIdx.x; i < p.scored; i += kThreads) {
    const int64_t at = int64_t(b) * p.scored + i;
    hand_on(p.words + at, sequence.position(i) < 0 ? 0.0f : bounded(__fdiv_rn(p.ready[at], p.temperature)));
  }
}

// A warp scores a candidate. Where it can't read 16 bytes at a time, W isn't used.
template <class T, class W, bool kAligned>
__device__ void score(const Params& p, int b, int i) {
  if (i >= p.scored) return;
  const int lane = threadIdx.x % kWarp;
  const int position = Sequence(p, b).position(i);
  const T* x = static_cast<const T*>(p.x) + b * p.x_b + position * p.x_n;
  float sum = 0;
  if (position >= 0) {
    if constexpr (kAligned) {
      constexpr int kPack = kWide<T>;
      const W* w = static_cast<const W*>(p.weight);
      const int packs = p.width / kPack;
      const unsigned long long stay = to_stay();
      for (int start = lane; start < packs; start += kUnroll * kWarp) {
        int4 bits[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = start + u * kWarp;
          bits[u] = load(reinterpret_cast<const int4*>(x) + c, c < packs, stay);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = start + u * kWarp;
          if (c >= packs) break;
          const auto& values = reinterpret_cast<const Pack<T, kPack>&>(bits[u]);
          const auto weights = *reinterpret_cast<const Pack<W, kPack>*>(w + c * kPack);
#pragma unroll
          for (int e = 0; e < kPack; ++e) sum += to_float(values.at[e]) * to_float(weights.at[e]);
        }
      }
    } else {
      for (int d = lane; d < p.width; d += kWarp) sum += to_float(x[d * p.x_d]) * load_any(p.weight, p.weight_dtype, d);
    }
  }
  sum = warp_sum(sum);
  const float logit = position < 0 ? 0.0f : bounded(__fdiv_rn(sum, p.temperature));
  if (lane == 0) hand_on(p.words + int64_t(b) * p.scored + i, logit);
}

// A warp fills a slot.
template <class T, bool kAligned>
__device__ void copy(const Params& p, int b, int j) {
  if (j >= p.k) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t at = int64_t(b) * p.k + j;
  const int i = await(p.slots + at);
  const int64_t position = i == kNone ? -1 : p.candidates ? __ldg(p.candidates + int64_t(b) * p.scored + i) : i;
  const T* x = static_cast<const T*>(p.x) + b * p.x_b + position * p.x_n;
  T* row = static_cast<T*>(p.rows) + at * p.width;
  if constexpr (kAligned) {
    const int packs = p.width / kWide<T>;
    const unsigned long long leave = to_leave();
    for (int start = lane; start < packs; start += kUnroll * kWarp) {
      int4 bits[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = start + u * kWarp;
        bits[u] = load(reinterpret_cast<const int4*>(x) + c, position >= 0 && c < packs, leave);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = start + u * kWarp;
        if (c < packs) store(reinterpret_cast<int4*>(row) + c, bits[u], leave);
      }
    }
  } else {
    copy_row<T, 1>(x, p.x_d, row, position >= 0, p.width);
  }
  if (lane == 0) {
    p.indices[at] = position;
    p.gates[at] = i == kNone ? 0.0f : gate_of(p, __int_as_float(await(p.words + int64_t(b) * p.scored + i)));
  }
}

__global__ void __launch_bounds__(kThreads) empty_kernel(int* words, int64_t n) {
  let_next_begin();
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) words[i] = kEmpty;
}

template <class T, class W, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks) route_kernel(const __grid_constant__ Params p) {
  __shared__ Shared s;
  unsigned* keys = launched_memory<unsigned>();
  await_previous();
  const int per_step = p.score_items + 1 + p.copy_items, warp = threadIdx.x / kWarp;
  const int step = blockIdx.x / per_step, item = blockIdx.x % per_step;
  if (item > p.score_items) {
    if (step >= p.lag) copy<T, kAligned>(p, step - p.lag, (item - p.score_items - 1) * kWarps + warp);
  } else if (step < p.batch) {
    if (item < p.score_items) {
      score<T, W, kAligned>(p, step, item * kWarps + warp);
    } else {
      if (p.ready) take_ready(p, step);
      if (p.recorded) repeat(p, s, step);
      else if (p.scored <= kKeys) choose<T, true>(p, s, keys, step);
      else choose<T, false>(p, s, keys, step);
    }
  }
}

}  // namespace

void route(Address x, Address weight, Address ready, Address candidates, Address seqlens, Address recorded,
           Address rows, Address indices, Address gates, Address words, Address counts,
           int batch, int length, int scored, int k, int width, int64_t x_b, int64_t x_n, int64_t x_d,
           int seqlens_dtype, int activation, double alpha, double temperature, double largest, int64_t in_flight,
           int dtype, int weight_dtype, Address stream) {
  if (!ready && weight_dtype != dtype && weight_dtype != kF32)
    throw std::invalid_argument("weight: expected float32 or the dtype of x");
  Params p{};
  p.x = pointer<void>(x), p.weight = pointer<void>(weight), p.ready = pointer<float>(ready);
  p.candidates = pointer<int64_t>(candidates), p.seqlens = pointer<void>(seqlens);
  p.recorded = pointer<int64_t>(recorded), p.rows = pointer<void>(rows), p.indices = pointer<int64_t>(indices);
  p.gates = pointer<float>(gates), p.words = pointer<int>(words), p.slots = p.words + int64_t(batch) * scored;
  p.counts = pointer<int>(counts);
  p.x_b = x_b, p.x_n = x_n, p.x_d = x_d;
  p.batch = batch, p.length = length, p.scored = scored, p.k = k, p.width = width;
  p.seqlens_dtype = seqlens_dtype;
  p.alpha = alpha, p.temperature = temperature, p.largest = largest, p.activation = activation;
  p.weight_dtype = weight_dtype;
  p.score_items = ready ? 0 : ceil_div(scored, kWarps);
  p.copy_items = ceil_div(k, kWarps);
  const int keys = scored <= kKeys && !recorded ? scored * int(sizeof(unsigned)) : 0;
  const int64_t empty = int64_t(batch) * (scored + k);
  launch(empty_kernel, std::min<int64_t>(ceil_div<int64_t>(empty, kThreads), 8 * device().multiprocessors), kThreads, 0,
         false, stream, p.words, empty);
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t each = std::max<int64_t>((int64_t(scored) + k) * width * sizeof(T), 1);
    p.lag = std::min<int64_t>(std::max<int64_t>(in_flight / each, 1), batch - 1);
    const bool wide = x_d == 1 && aligned<T>({x, rows, weight}, {x_b, x_n, width});
    const auto run = [&](auto kernel) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, keys), "route");
      const int64_t blocks = int64_t(batch + p.lag) * (p.score_items + 1 + p.copy_items);
      launch(kernel, blocks, kThreads, keys, true, stream, p);
    };
    if (!wide) run(route_kernel<T, T, false>);
    else if (weight_dtype == dtype || ready) run(route_kernel<T, T, true>);
    else run(route_kernel<T, float, true>);
  });
}

}  // namespace mor
