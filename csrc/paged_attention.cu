// Attention of a few queries over paged keys, split over the keys. A block takes one part of a lane's keys for one
// key/value head and a few rows, row = query * group + head of the group:
//
//   m' = max(m, max s);  p = exp(s - m');  l' = l exp(m - m') + sum p;  acc' = acc exp(m - m') + p v,   s = scale q k^T
//
// Its warps go through tiles of the keys in turn, each with copies of its own under way, and never wait for one
// another; at the end their m, l and acc are merged, in the order of the warps:
//
//   m = max m_i;  out = sum exp(m_i - m) acc_i / sum exp(m_i - m) l_i
//
// Where a lane has several parts, each leaves these in memory instead, and the block that comes last, which a counter
// tells, merges them likewise in a fixed order: the result doesn't depend on who that is.
//
// Queries are few, so the tensor cores get them as the side of 8: S^T (keys x queries) = k q^T, then O^T (width x
// queries) = v^T p^T. fp32 goes without tensor cores, and so do caches that can't be read 16 bytes at a time.
//
// Which lane is split into how many parts, only the device knows. A kernel of one block makes a line for each part;
// here the parts follow from sharing out all keys among as many blocks as run at once.
#include "instructions.cuh"

namespace mor {
namespace {

constexpr int kFields = 8;           // numbers of a line
constexpr int kEntry = kFields + 2;  // numbers of a range: its first line's, which line that is, and how many there are
constexpr int kMostRanges = 768;
constexpr int kScheduleThreads = 1024;
constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kAhead = 4;  // parts, or keys, of which a thread reads numbers at once
constexpr float kLeast = -1e38f;  // below any score, and finite: 2^(-inf - kLeast) is 0

// A part of a lane.
struct Line {
  int row;          // of the page table
  int query;        // the first of the tile
  int left;         // queries of the lane from that one on; 0 where there is no such part
  int keys;         // of the lane
  int first, last;  // keys of the part
  int first_part;   // of the tile
  int splits;       // parts of the tile

  __device__ __forceinline__ explicit Line(int number)  // of which each lane has one
      : row(of(number, 0)), query(of(number, 1)), left(of(number, 2)), keys(of(number, 3)), first(of(number, 4)),
        last(of(number, 5)), first_part(of(number, 6)), splits(of(number, 7)) {}

 private:
  __device__ __forceinline__ static int of(int number, int field) { return __shfl_sync(kAll, number, field); }
};

// Schedule, as Triton's: a line for each part there could be; counters, one for each first part of a tile and head,
// which return to 0 by themselves (atomicInc); ranges of lines.
struct Plan {
  const int* k_lens;
  const int64_t* rows;
  const int* cu_seqlens;
  int* schedule;
  int lanes, queries, lines, groups, block_q, unit, ranges, least;
};

struct Lane {
  int row, start, end, tiles, keys, units;  // units of the keys that each tile reads

  __device__ Lane(const Plan& p, int row, int start, int end, int keys)
      : row(row), start(start), end(end), tiles(end > start ? ceil_div(end - start, p.block_q) : 0), keys(keys),
        units(max(ceil_div(keys, p.unit), 1)) {}

  // Lane number `lanes` stands for the queries past the last lane's.
  __device__ static Lane load(const Plan& p, int lane) {
    const bool inside = lane < p.lanes;
    int row = -1, start = 0, end = 0, keys = 0;
    if (inside) {
      const int64_t named = p.rows ? p.rows[lane] : lane;
      const bool there = named >= 0 && named <= 0x7fffffff;
      const int length = p.k_lens[lane];
      row = there ? int(named) : -1;
      keys = there ? max(length, 0) : 0;
    }
    if (!p.cu_seqlens) {
      if (inside) start = lane, end = lane + 1;
    } else if (lane <= p.lanes) {
      start = p.cu_seqlens[lane];
      end = inside ? p.cu_seqlens[lane + 1] : p.queries;
    }
    return Lane(p, row, start, end, keys);
  }

  __device__ int64_t work() const { return int64_t(tiles) * units; }
};

// How the units of all tiles, one tile after another, are shared out: range r begins at unit r * work / ranges, unless
// that is within `least` units of the beginning or the end of a tile, and then there.
struct Cuts {
  int64_t work;
  int ranges, least;
  bool alone;  // each tile is a range instead: none is long enough to be cut, and there are as many ranges

  __device__ int64_t begin(int range) const { return range * work / ranges; }

  // Ranges, but for the first, that begin before a unit.
  __device__ int before(int64_t unit) const {
    return int(min(max((unit * ranges + work - 1) / work - 1, int64_t(0)), int64_t(ranges - 1)));
  }

  // The first and the last range that a tile's units are in.
  __device__ int2 of_tile(int tile, int64_t first_unit, int units) const {
    if (alone) return make_int2(tile, tile);
    const int64_t low = first_unit + min(least, (units + 1) / 2), high = first_unit + units - least;
    const int first = before(low);
    return make_int2(first, high < low ? first : before(high + 1));
  }
};

template <class T>
__device__ __forceinline__ T warp_scan(T x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kAll, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

// The sum of the block's numbers before the thread's, and of all. `of_warps` is used once between two barriers.
__device__ __forceinline__ int64_t block_scan(int64_t x, int64_t* of_warps, int64_t& sum) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t inside = warp_scan(x);
  if (lane == kWarp - 1) of_warps[warp] = inside;
  __syncthreads();
  const int64_t of_warp = of_warps[lane], up_to = warp_scan(of_warp);
  sum = __shfl_sync(kAll, up_to, kWarp - 1);
  return __shfl_sync(kAll, up_to - of_warp, warp) + inside - x;
}

// A tile's piece in range r has line number tile + r, which leaves lines empty where a range begins with a tile.
__global__ void __launch_bounds__(kScheduleThreads) attention_schedule_kernel(const __grid_constant__ Plan p) {
  static_assert(kScheduleThreads == kWarp * kWarp);
  __shared__ int64_t of_warps[2][kWarp];
  __shared__ int ends[kScheduleThreads];  // lines of the lanes up to each one
  __shared__ int4 lanes[kScheduleThreads];
  __shared__ int tiles_before[kScheduleThreads];
  __shared__ int64_t work_before[kScheduleThreads];
  __shared__ int first_of[kMostRanges], last_of[kMostRanges];  // lines of a range
  take_over();
  const int all = p.lanes + (p.cu_seqlens ? 1 : 0);
  for (int r = threadIdx.x; r < p.ranges; r += kScheduleThreads) first_of[r] = 0x7fffffff, last_of[r] = -1;
  int64_t own_work = 0, own_tiles = 0, tiles;
  bool cuttable = false;
  for (int i = threadIdx.x; i < all; i += kScheduleThreads) {
    const Lane lane = Lane::load(p, i);
    own_work += lane.work(), own_tiles += lane.tiles;
    cuttable |= lane.tiles && lane.units >= 2 * p.least;
  }
  Cuts cuts{};
  block_scan(own_work, of_warps[0], cuts.work);
  block_scan(own_tiles, of_warps[1], tiles);
  cuts.work = max(cuts.work, int64_t(1));
  cuts.alone = !__syncthreads_or(cuttable) && tiles <= p.ranges;
  cuts.ranges = int(min(max(max(cuts.work / p.least, tiles), int64_t(1)), int64_t(p.ranges)));
  cuts.least = p.least;

  int done = 0;
  int64_t tiles_done = 0, work_done = 0;
  for (int first = 0; first < all; first += kScheduleThreads) {
    const Lane own = Lane::load(p, first + threadIdx.x);
    int64_t more_tiles, more_work;
    const int tile = int(tiles_done + block_scan(own.tiles, of_warps[0], more_tiles));
    const int64_t unit = work_done + block_scan(own.work(), of_warps[1], more_work);
    const int last = max(own.tiles - 1, 0);
    const int2 ranges = cuts.of_tile(tile + last, unit + int64_t(last) * own.units, own.tiles ? own.units : 0);
    ends[threadIdx.x] = tile + last + ranges.y + (own.tiles ? 1 : 0);
    lanes[threadIdx.x] = make_int4(own.row, own.start, own.end, own.keys);
    tiles_before[threadIdx.x] = tile, work_before[threadIdx.x] = unit;
    __syncthreads();
    const int end = min(ends[kScheduleThreads - 1], p.lines);
    for (int number = done + threadIdx.x; number < end; number += kScheduleThreads) {
      int of = 0;  // the first lane that ends past it
#pragma unroll
      for (int step = kScheduleThreads / 2; step; step /= 2)
        if (ends[of + step - 1] <= number) of += step;
      const Lane lane(p, lanes[of].x, lanes[of].y, lanes[of].z, lanes[of].w);
      const auto ranges_of = [&](int nth) {
        return cuts.of_tile(tiles_before[of] + nth, work_before[of] + int64_t(nth) * lane.units, lane.units);
      };
      int nth = 0;  // the last of its tiles that begins at most there
      for (int high = lane.tiles; high - nth > 1;) {
        const int middle = (nth + high) / 2;
        (tiles_before[of] + middle + ranges_of(middle).x <= number ? nth : high) = middle;
      }
      const int2 within = ranges_of(nth);
      const int line = tiles_before[of] + nth, range = number - line, query = lane.start + nth * p.block_q;
      const int64_t unit = work_before[of] + int64_t(nth) * lane.units;
      int4* to = reinterpret_cast<int4*>(p.schedule + int64_t(number) * kFields);
      if (!lane.tiles || range < within.x || range > within.y) {
        to[0] = to[1] = make_int4(0, 0, 0, 0);
        continue;
      }
      const int begin = range > within.x ? int(cuts.begin(range) - unit) * p.unit : 0;
      const int stop = range < within.y ? int(cuts.begin(range + 1) - unit) * p.unit : lane.keys;
      to[0] = make_int4(lane.row, query, lane.end - query, lane.keys);
      to[1] = make_int4(begin, stop, line + within.x, within.y - within.x + 1);
      atomicMin(&first_of[range], number), atomicMax(&last_of[range], number);
    }
    done = end, tiles_done += more_tiles, work_done += more_work;
    __syncthreads();
  }
  for (int i = done + threadIdx.x; i < p.lines; i += kScheduleThreads) {
    int4* line = reinterpret_cast<int4*>(p.schedule + int64_t(i) * kFields);
    line[0] = line[1] = make_int4(0, 0, 0, 0);
  }
  int* counters = p.schedule + int64_t(p.lines) * kFields;
  const int64_t all_counters = int64_t(p.lines) * p.groups;
  for (int64_t i = threadIdx.x; i < all_counters; i += kScheduleThreads) counters[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.ranges * kEntry; i += kScheduleThreads) {
    const int range = i / kEntry, field = i % kEntry, first = first_of[range], count = last_of[range] - first + 1;
    const bool there = last_of[range] >= 0;
    int number = field == kFields ? first : count;
    if (field < kFields && there) number = p.schedule[int64_t(first) * kFields + field];
    counters[all_counters + i] = there ? number : 0;
  }
}

struct Cache {
  const char* x;
  const float* scales;
  int64_t page, slot, head, d;      // strides: bytes, and elements of the last
  unsigned page_units, slot_units;  // of 16 bytes
};

struct Attention {
  const void* q;
  Cache k, v;
  const int* page_table;
  int* schedule;
  const void* positions;
  void* out;
  float* sums;         // a line of `pitch` numbers for each row of each part and head
  float2* statistics;  // m and l of each
  int64_t q_token, q_head, q_d;
  float factor;  // scale * log2 e
  int lines, ranges, table_rows, max_pages;
  int room;  // for keys, in a row of the page table
  int groups, width, pitch, block_q, rows, row_tiles;
  int positions_dtype, dtype, cache_dtype;
  Divisor page_size, group;

  __device__ int heads() const { return groups * group.divisor; }
  __device__ int* counters() const { return schedule + int64_t(lines) * kFields; }
  __device__ const int* entries() const { return counters() + int64_t(lines) * groups; }
};

// What is compiled: the type that caches hold (uint8_t: e4m3), a width that heads are filled up to with zeros, tiles of
// 8 rows, and whether caches and q can have any type and lie anyhow, and become fp32 element by element.
template <class T, int D, int N, bool A = false>
struct Setting {
  using Stored = T;
  static constexpr bool kAny = A;
  static constexpr bool kFp8 = std::is_same_v<T, uint8_t>;
  static constexpr bool kPlain = std::is_same_v<T, float>;  // without tensor cores
  using Number = std::conditional_t<kFp8, fp16, T>;         // of products
  static constexpr int kWidth = D, kRows = 8 * N;
  static constexpr int kKeys = kFp8 ? 32 : 16;  // of a tile
  static constexpr int kRowBytes = D * sizeof(T), kChunks = kRowBytes / 16;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kStages = kTileBytes > 4096 ? 1 : 2;
  static constexpr int kTilesPlaced = kWarp / kKeys;  // whose keys are a lane's each
  static constexpr int kTurn = kStages > kTilesPlaced ? kStages : kTilesPlaced;  // tiles after which all is as it was
  static constexpr int kPlaces = kStages / kTilesPlaced + 1;  // of a lane, for those that fill the ring and one more
  static constexpr int kQueryBytes = D * sizeof(Number) + 16;  // of a row; the 16 keep rows off each other's banks
  static constexpr int kPitch = D + 4;
  // whether shared memory has room for acc beside the keys of the next part
  static constexpr bool kApart = D == 64 && !kPlain;
  // of a multiprocessor, as _blocks() in ops/paged_attention/_parts.py has it for tiles of 8 rows
  static constexpr int kBlocks = D == 64 && N == 1 && !kPlain ? (kFp8 ? 4 : 5) : D * N * (kFp8 || kPlain) > 128 ? 2 : 3;
  static_assert(kApart || kRows * kPitch * 4 <= kStages * 2 * kTileBytes);
  static_assert(kTileBytes % 128 == 0);
};

template <class C>
struct Shared {
  char ring[kWarps][C::kStages][2][C::kTileBytes];  // keys and values
  char q[C::kRows * C::kQueryBytes];
  float p[C::kPlain ? kWarps : 1][C::kPlain ? C::kKeys : 1][8];
  float own_acc[C::kApart ? kWarps : 1][C::kApart ? C::kRows * C::kPitch : 4];
  float2 statistics[kWarps][C::kRows];
  float factor[C::kRows];
  int visible[C::kRows];  // the last key that a row sees
  int last;

  __device__ float* acc(int warp) { return C::kApart ? own_acc[warp] : reinterpret_cast<float*>(ring[warp]); }
};

// Chunks of 16 bytes change places within a row, so that those of neighbouring rows lie in different banks, whether
// they are read a column of chunks at a time or four chunks of two rows.
template <class C>
__device__ __forceinline__ int swizzle(int key) {
  return C::kChunks < 8 ? key >> 1 & 3 : (key & 1) << 2 | (key >> 1 & 3);
}

// The address of a chunk that many bytes further along a row, of which eight change places.
__device__ __forceinline__ unsigned along(unsigned row, int bytes) { return (row ^ (bytes & 112)) + (bytes & ~127); }

template <class T>
__device__ __forceinline__ unsigned pair_of(float a, float b) {
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const unsigned&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(a, b);
    return reinterpret_cast<const unsigned&>(pair);
  }
}

__device__ __forceinline__ unsigned word_at(const char* p) { return *reinterpret_cast<const unsigned*>(p); }

// Rows of a warp on the tensor cores: m, l and acc of the keys that it has seen. Lane 4g + t has rows 2t and 2t + 1 of
// each tile of 8.
template <class C>
struct TensorRows {
  using T = typename C::Number;
  static constexpr int kTiles = C::kRows / 8, kSteps = C::kWidth / 16, kPairs = C::kKeys / 16;
  static constexpr bool kHeld = C::kWidth * kTiles <= 128;  // registers have room for q
  const char* q;
  unsigned keys, values;  // of the lane in the first tile of the warp's ring
  unsigned held[kHeld ? kSteps : 1][2 * kTiles];
  float acc[kSteps][kTiles][4];
  float largest[kTiles][2], total[kTiles][2], factor[kTiles][2];
  unsigned p[kTiles][kPairs][2];

  __device__ __forceinline__ explicit TensorRows(Shared<C>& shared) : q(shared.q) {
    const int lane = threadIdx.x % kWarp, t = lane % 4;
    const unsigned ring = shared_address(shared.ring[threadIdx.x / kWarp]);
    if constexpr (C::kFp8) {
      keys = kept(ring + lane / 4 * C::kRowBytes + (t ^ swizzle<C>(lane / 4)) * 16);
      values = kept(ring + C::kTileBytes + lane * C::kRowBytes + swizzle<C>(lane) * 16);
    } else {
      const int of_k = lane % 16, of_v = lane % 8 + lane / 16 * 8;
      keys = kept(ring + of_k * C::kRowBytes + (lane / 16 ^ swizzle<C>(of_k)) * 16);
      values = kept(ring + C::kTileBytes + of_v * C::kRowBytes + (lane / 8 % 2 ^ swizzle<C>(of_v)) * 16);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        largest[n][e] = kLeast, total[n][e] = 0.0f;
        factor[n][e] = shared.factor[8 * n + 2 * t + e];
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0.0f;
    }
    if constexpr (kHeld) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) read_query(held[step], step);
    }
  }

  // Of 16 dimensions: two words of each tile of rows. With e4m3, a thread's are those of the bytes of k that it reads.
  __device__ __forceinline__ void read_query(unsigned (&x)[2 * kTiles], int step) const {
    const int row = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    const int d = C::kFp8 ? step / 4 * 64 + t * 16 + step % 4 * 4 : step * 16 + t * 2;
    const int further = C::kFp8 ? 2 : 8;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const char* from = q + (row + 8 * n) * C::kQueryBytes + d * 2;
      x[n] = word_at(from), x[kTiles + n] = word_at(from + further * 2);
    }
  }

  // S^T = k q^T of 16 dimensions and keys
  __device__ __forceinline__ void add_products(float (&s)[kTiles][4], const unsigned (&k)[4], int step) const {
    unsigned x[2 * kTiles];
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) x[i] = held[step][i];
    } else {
      read_query(x, step);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) multiply_add<T>(s[n], k, x[n], x[kTiles + n]);
  }

  // Of keys 16i + g: rows 2t and 2t + 1 of tile n, then those of keys 16i + g + 8.
  __device__ __forceinline__ void score(float (&s)[kPairs][kTiles][4], int tile) const {
    const int offset = tile * 2 * C::kTileBytes;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0.0f;
    if constexpr (C::kFp8) {
#pragma unroll
      for (int block = 0; block < kSteps / 4; ++block) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          unsigned x[4], y[4];
          const unsigned from = along(keys, block * 64) + i * 16 * C::kRowBytes + offset;
          load_shared(x, from), load_shared(y, from + 8 * C::kRowBytes);
#pragma unroll
          for (int u = 0; u < 4; ++u) {
            const unsigned k[4] = {from_e4m3(x[u]), from_e4m3(y[u]), from_e4m3(x[u] >> 16), from_e4m3(y[u] >> 16)};
            add_products(s[i], k, 4 * block + u);
          }
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          unsigned k[4];
          load_matrices(k, along(keys, step * 32) + i * 16 * C::kRowBytes + offset);
          add_products(s[i], k, step);
        }
      }
    }
  }

  // Of a tile of the ring, whose first key is number `first`; `whole` tells that all rows see all of them.
  __device__ __forceinline__ void see_keys(int tile, int first, bool whole, const Shared<C>& shared) {
    float s[kPairs][kTiles][4];
    score(s, tile);
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] *= factor[n][e % 2];
    if (!whole) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int seen = shared.visible[8 * n + 2 * t + e % 2] - first - g - e / 2 * 8;
#pragma unroll
          for (int i = 0; i < kPairs; ++i)
            if (16 * i > seen) s[i][n][e] = -INFINITY;
        }
    }
    float fade[kTiles][2];
    bool fades = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float most = largest[n][e], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) most = fmaxf(most, fmaxf(s[i][n][e], s[i][n][e + 2]));
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
        fade[n][e] = exp2_approx(largest[n][e] - most);
        fades |= !(fade[n][e] == 1.0f);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          s[i][n][e] = exp2_approx(s[i][n][e] - most), s[i][n][e + 2] = exp2_approx(s[i][n][e + 2] - most);
          sum += s[i][n][e] + s[i][n][e + 2];
        }
        total[n][e] = total[n][e] * fade[n][e] + sum;
        largest[n][e] = most;
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        p[n][i][0] = transposed(pair_of<T>(s[i][n][0], s[i][n][1]));
        p[n][i][1] = transposed(pair_of<T>(s[i][n][2], s[i][n][3]));
      }
    }
    if (__any_sync(kAll, fades)) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[i][n][e] *= fade[n][e % 2];
    }
  }

  // O^T += v^T p^T
  __device__ __forceinline__ void add_values(int tile, Shared<C>&) {
    const int offset = tile * 2 * C::kTileBytes;
    if constexpr (C::kFp8) {
      // pairs of dimensions as numbers of 16 bits: row g of a matrix is dimension 2g, row g + 8 is 2g + 1
      static_assert(kPairs == 2);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        unsigned x[4], a[4];
        load_transposed(x, along(values, i * 16) + offset);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const unsigned sorted = __byte_perm(x[2 * half + e], 0, 0x3120);
            a[2 * e] = from_e4m3(sorted), a[2 * e + 1] = from_e4m3(sorted >> 16);
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) multiply_add<T>(acc[i][n], a, p[n][half][0], p[n][half][1]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          unsigned a[4];
          load_transposed(a, along(values, i * 32) + j * 16 * C::kRowBytes + offset);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) multiply_add<T>(acc[i][n], a, p[n][j][0], p[n][j][1]);
        }
      }
    }
  }

  __device__ __forceinline__ void leave(Shared<C>& shared, int warp) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    float* to = shared.acc(warp);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) total[n][e] += __shfl_xor_sync(kAll, total[n][e], step);
        if (g == 0) shared.statistics[warp][8 * n + 2 * t + e] = make_float2(largest[n][e], total[n][e]);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int d = i * 16 + (C::kFp8 ? 2 * g + e / 2 : g + e / 2 * 8);
          to[(8 * n + 2 * t + e % 2) * C::kPitch + d] = acc[i][n][e];
        }
      }
    }
  }
};

// The same in fp32: for scores a lane has a key and every other four dimensions of it, for values a few dimensions.
template <class C>
struct PlainRows {
  static constexpr int kRows = 8, kEach = C::kWidth / kWarp, kVector = kEach < 4 ? kEach : 4;
  float acc[kRows][kEach], largest[kRows], total[kRows];

  __device__ __forceinline__ explicit PlainRows(Shared<C>&) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = kLeast, total[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < kEach; ++e) acc[r][e] = 0.0f;
    }
  }

  __device__ __forceinline__ void see_keys(int tile, int first, bool, Shared<C>& shared) {
    const int warp = threadIdx.x / kWarp, key = threadIdx.x % 16, half = threadIdx.x % kWarp / 16;
    const char* k = shared.ring[warp][tile][0];
    float s[kRows]{};
#pragma unroll 1
    for (int chunk = half; chunk < C::kChunks; chunk += 2) {
      const float4 x = *reinterpret_cast<const float4*>(k + key * C::kRowBytes + (chunk ^ swizzle<C>(key)) * 16);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 y = *reinterpret_cast<const float4*>(shared.q + r * C::kQueryBytes + chunk * 16);
        s[r] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, s[r]))));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float dot = s[r] + __shfl_xor_sync(kAll, s[r], 16);
      s[r] = first + key <= shared.visible[r] ? dot * shared.factor[r] : -INFINITY;
      float most = fmaxf(largest[r], s[r]);
#pragma unroll
      for (int step = 8; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
      const float fade = exp2_approx(largest[r] - most);
      s[r] = exp2_approx(s[r] - most);
      total[r] = total[r] * fade + s[r];
      largest[r] = most;
#pragma unroll
      for (int e = 0; e < kEach; ++e) acc[r][e] *= fade;
    }
    float4* p = reinterpret_cast<float4*>(shared.p[warp][key]);
    if (half == 0) p[0] = make_float4(s[0], s[1], s[2], s[3]);
    else p[1] = make_float4(s[4], s[5], s[6], s[7]);
  }

  __device__ __forceinline__ void add_values(int tile, Shared<C>& shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const char* v = shared.ring[warp][tile][1];
#pragma unroll 2
    for (int key = 0; key < C::kKeys; ++key) {
      const float4* p = reinterpret_cast<const float4*>(shared.p[warp][key]);
      const float4 low = p[0], high = p[1];
      const float weights[kRows] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int part = 0; part < kEach; part += kVector) {
        const int byte = (part * kWarp + lane * kVector) * 4;
        const auto x = *reinterpret_cast<const Pack<float, kVector>*>(
            v + key * C::kRowBytes + (byte / 16 ^ swizzle<C>(key)) * 16 + byte % 16);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) acc[r][part + e] = fmaf(weights[r], x.at[e], acc[r][part + e]);
        }
      }
    }
  }

  __device__ __forceinline__ void leave(Shared<C>& shared, int warp) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int step = 8; step; step /= 2) total[r] += __shfl_xor_sync(kAll, total[r], step);
      if (lane == 0) shared.statistics[warp][r] = make_float2(largest[r], total[r]);
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        shared.acc(warp)[r * C::kPitch + e / kVector * kVector * kWarp + lane * kVector + e % kVector] = acc[r][e];
    }
  }
};

// The page of a key; 0 if the part ends before it.
__device__ __forceinline__ int page_of(const Attention& p, const int* table, int key, int last) {
  return key < last ? table[p.page_size(key)] : 0;
}

__device__ __forceinline__ float number_at(const char* x, int dtype, int64_t i) {
  if (dtype != kE4M3) return load_any(x, dtype, i);
  const unsigned pair = from_e4m3(static_cast<unsigned char>(x[i]));
  return __low2float(reinterpret_cast<const __half2&>(pair));
}

// Which chunk of which of the keys that are copied together a lane copies, of a head's keys or values, and where to.
template <class C>
struct Copier {
  static constexpr int kCopies = C::kKeys * C::kChunks / kWarp, kUnrolled = kCopies < 4 ? kCopies : 4;
  static constexpr unsigned kNowhere = ~0u;
  const char *k, *v;
  unsigned to;    // in the first tile of the warp's ring
  unsigned lane;  // that has the key, but for how far in the tile

  __device__ __forceinline__ Copier(const Attention& p, int g, Shared<C>& shared) {
    const int nth = threadIdx.x % kWarp / C::kChunks, chunk = threadIdx.x % kWarp % C::kChunks;
    k = p.k.x + g * p.k.head, v = p.v.x + g * p.v.head;
    if constexpr (!C::kAny) {
      k = kept(k + chunk * 16), v = kept(v + chunk * 16), lane = kept(nth);
      to = kept(shared_address(shared.ring[threadIdx.x / kWarp]) + nth * C::kRowBytes + (chunk ^ swizzle<C>(nth)) * 16);
    }
  }

  // A tile whose first key is that of lane `start`, given each lane's key and its page; zeros where the part has ended
  // (what is there may be NaN) and past the width. `whole` tells that there are none of these.
  __device__ __forceinline__ void copy(const Attention& p, bool of_v, int page, int key_of_lane, int last, int start,
                                       bool whole, int tile, Shared<C>& shared) const {
    const Cache& cache = of_v ? p.v : p.k;
    const char* base = of_v ? v : k;
    const unsigned slot = key_of_lane - p.page_size(key_of_lane) * p.page_size.divisor;
    if constexpr (C::kAny) {
      uint64_t own = 0;  // address
      if (key_of_lane < last) own = uint64_t(base + unsigned(page) * cache.page + slot * cache.slot);
      copy_any(p, cache, own, start, shared.ring[threadIdx.x / kWarp][tile][of_v]);
      return;
    }
    unsigned own = page * cache.page_units + slot * cache.slot_units;
    const int first = start + lane;
    const unsigned target = to + (2 * tile + of_v) * C::kTileBytes;
    if (whole) {
#pragma unroll kUnrolled
      for (int i = 0; i < kCopies; ++i) {
        const int key = i * kWarp / C::kChunks, further = i * kWarp % C::kChunks;
        const unsigned unit = __shfl_sync(kAll, own, first + key);
        copy_async((target ^ swizzle<C>(key) * 16) + key * C::kRowBytes + further * 16,
                   base + (uint64_t(unit) * 16 + further * 16));
      }
    } else {
      if (key_of_lane >= last) own = kNowhere;
      const int chunks = p.width * int(sizeof(typename C::Stored)) / 16 - int(threadIdx.x) % kWarp % C::kChunks;
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const int key = i * kWarp / C::kChunks, further = i * kWarp % C::kChunks;
        const unsigned unit = __shfl_sync(kAll, own, first + key);
        const unsigned at = (target ^ swizzle<C>(key) * 16) + key * C::kRowBytes + further * 16;
        if (unit != kNowhere && further < chunks) copy_async(at, base + (uint64_t(unit) * 16 + further * 16));
        else clear_shared(at);
      }
    }
  }

 private:
  __device__ __forceinline__ static void copy_any(const Attention& p, const Cache& cache, uint64_t own, int start,
                                                  char* to) {
#pragma unroll 1
    for (int first = 0; first < C::kKeys; first += kAhead) {
      const char* from[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        from[i] = reinterpret_cast<const char*>(__shfl_sync(kAll, own, start + first + i));
#pragma unroll 1
      for (int d = threadIdx.x % kWarp; d < C::kWidth; d += kWarp) {
        float x[kAhead]{};
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (from[i] && d < p.width) x[i] = number_at(from[i], p.cache_dtype, d * cache.d);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int key = first + i;
          *reinterpret_cast<float*>(to + key * C::kRowBytes + (d / 4 ^ swizzle<C>(key)) * 16 + d % 4 * 4) = x[i];
        }
      }
    }
  }
};

// The block's rows of q, zeros where there are none, and what turns a product into an exponent of 2. With e4m3 the
// largest of a row gets an exponent of 0, so that it fits into fp16, which e4m3 becomes in one instruction for two.
template <class C>
struct Queries {
  static constexpr int kRowsEach = C::kRows / kWarps, kEach = C::kWidth / kWarp;
  // as it comes from memory, so that nothing waits for it until share(): with e4m3, one of the types of 16 bits
  using Held = std::conditional_t<C::kAny, float, std::conditional_t<C::kFp8, unsigned short, typename C::Stored>>;
  Held x[kRowsEach][kEach];

  __device__ __forceinline__ void load(const Attention& p, const Line& line, int g, int first, int here) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = warp + i * kWarps, query = p.group(first + row);
      const int head = g * p.group.divisor + first + row - query * p.group.divisor;
      const int64_t from = int64_t(line.query + query) * p.q_token + head * p.q_head;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int d = lane + j * kWarp;
        x[i][j] = Held{};
        if (row >= here || d >= p.width) continue;
        const int64_t at = from + d * p.q_d;
        if constexpr (C::kAny) x[i][j] = load_any(p.q, p.dtype, at);
        else x[i][j] = static_cast<const Held*>(p.q)[at];
      }
    }
  }

  __device__ __forceinline__ void share(const Attention& p, Shared<C>& shared, float factor) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = warp + i * kWarps;
      auto* to = reinterpret_cast<typename C::Number*>(shared.q + row * C::kQueryBytes) + lane;
      float power = 1.0f;
      if constexpr (C::kFp8) {
        float wide[kEach], most = 0.0f;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          wide[j] = p.dtype == kBF16 ? __uint_as_float(x[i][j] << 16) : __half2float(__ushort_as_half(x[i][j]));
          most = fmaxf(most, fabsf(wide[j]));
        }
#pragma unroll
        for (int step = kWarp / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
        const unsigned size = __float_as_uint(most) & 0x7f800000u;
        power = __uint_as_float(size);
        const float inverse = __uint_as_float((254u << 23) - size);
#pragma unroll
        for (int j = 0; j < kEach; ++j) to[j * kWarp] = from_float<fp16>(wide[j] * inverse);
      } else {
#pragma unroll
        for (int j = 0; j < kEach; ++j) to[j * kWarp] = x[i][j];
      }
      if (lane == 0) shared.factor[row] = factor * power;
    }
  }
};

// acc, m and l of four dimensions of a row, from all warps.
struct Merged {
  float4 acc;
  float largest, total;

  __device__ __forceinline__ Merged() : acc(make_float4(0, 0, 0, 0)), largest(kLeast), total(0.0f) {}

  __device__ __forceinline__ void add(float weight, float l, const float4& x) {
    total = fmaf(weight, l, total);
    acc.x = fmaf(weight, x.x, acc.x), acc.y = fmaf(weight, x.y, acc.y);
    acc.z = fmaf(weight, x.z, acc.z), acc.w = fmaf(weight, x.w, acc.w);
  }

  __device__ __forceinline__ void scale(float factor) {
    acc.x *= factor, acc.y *= factor, acc.z *= factor, acc.w *= factor;
  }
};

template <class C>
__device__ __forceinline__ Merged merge_warps(Shared<C>& shared, int row, int d) {
  Merged merged;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) merged.largest = fmaxf(merged.largest, shared.statistics[w][row].x);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float2 statistics = shared.statistics[w][row];
    const float4 x = *reinterpret_cast<const float4*>(shared.acc(w) + row * C::kPitch + d);
    merged.add(exp2_approx(statistics.x - merged.largest), statistics.y, x);
  }
  return merged;
}

// acc / l, and zeros where nothing was seen; NaN stays.
template <class C>
__device__ __forceinline__ void write_out(const Attention& p, const Line& line, int g, int m, int d,
                                          const Merged& merged) {
  const float l = merged.total;
  const auto normal = [l](float x) { return l != 0.0f ? x / l : 0.0f; };
  const float x[4] = {normal(merged.acc.x), normal(merged.acc.y), normal(merged.acc.z), normal(merged.acc.w)};
  const int query = p.group(m), head = g * p.group.divisor + m - query * p.group.divisor;
  const int64_t at = (int64_t(line.query + query) * p.heads() + head) * p.width + d;
  const auto write = [&](auto zero) {
    using T = decltype(zero);
    T* out = static_cast<T*>(p.out) + at;
    const Pack<T, 4> pack{from_float<T>(x[0]), from_float<T>(x[1]), from_float<T>(x[2]), from_float<T>(x[3])};
    if (p.width % 4 == 0) {
      *reinterpret_cast<Pack<T, 4>*>(out) = pack;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (d + e < p.width) out[e] = pack.at[e];
    }
  };
  if constexpr (!C::kFp8 && !C::kAny) write(typename C::Stored{});
  else if (p.dtype == kBF16) write(bf16{});
  else if (p.dtype == kF16) write(fp16{});
  else write(float{});
}

// A number a lane of a line, or of a range.
__device__ __forceinline__ int load_line(const Attention& p, int line) {
  return p.schedule[int64_t(line) * kFields + threadIdx.x % kFields];
}

__device__ __forceinline__ int load_range(const Attention& p, int range) {
  return p.entries()[range * kEntry + min(threadIdx.x % kWarp, kEntry - 1)];
}

// The end of a part's keys, as far as the page table goes.
__device__ __forceinline__ int last_of(const Attention& p, const Line& line) {
  return line.row >= 0 && line.row < p.table_rows ? min(line.last, p.room) : 0;
}

// Rows of a tile of queries that a block's rows from `first` on are, at the most kRows.
template <class C>
__device__ __forceinline__ int rows_here(const Attention& p, const Line& line, int first) {
  return min(min(line.left, p.block_q) * p.group.divisor - first, C::kRows);
}

// The last of a tile's parts puts them together, each warp every fourth part.
template <class C>
__device__ __forceinline__ void merge_parts(const Attention& p, const Line& line, int g, Shared<C>& shared) {
  constexpr int kUnits = C::kWidth / 4;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int first = 0; first < p.rows; first += C::kRows) {
    const int here = rows_here<C>(p, line, first);
    if (here <= 0) break;
    for (int unit = lane; unit < here * kUnits; unit += kWarp) {
      const int row = unit / kUnits, d = unit % kUnits * 4;
      if (d >= p.width) continue;
      Merged merged;
      for (int split = warp; split < line.splits; split += kWarps * kAhead) {
        float2 statistics[kAhead];
        float4 x[kAhead];
        float most = merged.largest;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int part = line.first_part + split + i * kWarps;
          const int64_t at = (int64_t(part) * p.groups + g) * p.rows + first + row;
          const bool there = split + i * kWarps < line.splits;
          statistics[i] = there ? __ldcg(p.statistics + at) : make_float2(kLeast, 0.0f);
          x[i] = there ? __ldcg(reinterpret_cast<const float4*>(p.sums + at * p.pitch + d)) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) most = fmaxf(most, statistics[i].x);
        const float fade = exp2_approx(merged.largest - most);
        merged.total *= fade, merged.scale(fade), merged.largest = most;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) merged.add(exp2_approx(statistics[i].x - most), statistics[i].y, x[i]);
      }
      *reinterpret_cast<float4*>(shared.acc(warp) + row * C::kPitch + d) = merged.acc;
      if (d == 0) shared.statistics[warp][row] = make_float2(merged.largest, merged.total);
    }
    __syncthreads();
    for (int unit = threadIdx.x; unit < here * kUnits; unit += kThreads) {
      const int row = unit / kUnits, d = unit % kUnits * 4;
      if (d < p.width) write_out<C>(p, line, g, first + row, d, merge_warps<C>(shared, row, d));
    }
    __syncthreads();
  }
}

// What is looked up for a part while the one before it is under way.
template <class C>
struct Upcoming {
  int pages[C::kPlaces];

  __device__ __forceinline__ Upcoming(const Attention& p, int number) {  // of its line, a number a lane
    const Line line(number);
    const int* table = p.page_table + int64_t(line.row) * p.max_pages;
#pragma unroll
    for (int i = 0; i < C::kPlaces; ++i) pages[i] = page_of(p, table, key(line.first, i), last_of(p, line));
  }

  // That a lane places, the i-th.
  __device__ __forceinline__ static int key(int first, int i) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    return first + (warp + (i * C::kTilesPlaced + lane / C::kKeys) * kWarps) * C::kKeys + lane % C::kKeys;
  }
};

// The keys of a part that a warp goes through, for the block's rows of a tile, from number `row` on.
template <class C>
struct Part {
  int first, last;
  int tiles, whole;  // of the warp: of all, those at the beginning that have no zeros, and of which all rows see all
  int position;      // of the last key that row `lane` sees
  const int* table;
  int key, page;  // of the lane, of the next tiles that will be copied

  // From here on the ring is filled.
  __device__ __forceinline__ Part(const Attention& p, const Line& line, int g, int row, const Copier<C>& copier,
                                  Upcoming<C>& upcoming, Queries<C>& q, Shared<C>& shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, here = rows_here<C>(p, line, row);
    q.load(p, line, g, row, here);
    position = -1;
    if (lane < here) {
      const int query = p.group(row + lane);
      position = line.keys - line.left + query;  // the queries are the newest tokens
      if (p.positions) {
        const int64_t token = line.query + query;
        const int64_t named = p.positions_dtype ? static_cast<const int*>(p.positions)[token]
                                                : static_cast<const int64_t*>(p.positions)[token];
        position = int(max(min(named, int64_t(line.keys - 1)), int64_t(-1)));
      }
    }
    table = p.page_table + int64_t(line.row) * p.max_pages;
    first = line.first, last = min(last_of(p, line), __reduce_max_sync(kAll, position) + 1);
    position = min(position, last - 1);
    // tiles of the warp that end at most at a key
    const auto up_to = [&](int end) {
      const int beyond = end - first - (warp + 1) * C::kKeys;
      return beyond < 0 ? 0 : beyond / (kWarps * C::kKeys) + 1;
    };
    tiles = last > first ? up_to(last + C::kKeys - 1) : 0;
    const int seen = __reduce_min_sync(kAll, lane < here ? position : last) + 1;
    whole = p.width == C::kWidth ? up_to(min(seen, last)) : 0;
#pragma unroll 1
    for (int i = 0; i < 2 * C::kStages; ++i) {  // not unrolled: instructions are fetched from memory, too
      const int tile = i / 2, nth = tile / C::kTilesPlaced, start = tile % C::kTilesPlaced * C::kKeys;
      key = Upcoming<C>::key(first, nth), page = nth ? upcoming.pages[C::kPlaces > 2] : upcoming.pages[0];
      if (tile < tiles) copier.copy(p, i % 2, page, key, last, start, tile < whole, tile, shared);
      end_group();
    }
    key = Upcoming<C>::key(first, C::kPlaces - 1), page = upcoming.pages[C::kPlaces - 1];
  }

  // Once the one before no longer needs what is shared.
  __device__ __forceinline__ void share(const Attention& p, int g, const Queries<C>& q, Shared<C>& shared) const {
    q.share(p, shared, p.k.scales ? p.factor * p.k.scales[g] : p.factor);
    if (threadIdx.x < C::kRows) shared.visible[threadIdx.x] = position;
  }

  template <class R>
  __device__ __forceinline__ void attend(const Attention& p, const Copier<C>& copier, R& rows, Shared<C>& shared) {
    const int warp = threadIdx.x / kWarp;
    constexpr int kStages = C::kStages;
    for (int turn = 0; turn < tiles; turn += C::kTurn) {
#pragma unroll
      for (int i = 0; i < C::kTurn; ++i) {
        const int tile = turn + i, next = tile + kStages, slot = i % kStages;
        const int start = (i + kStages) % C::kTilesPlaced * C::kKeys;
        if (tile >= tiles) break;
        await_groups<2 * kStages - 1>();
        __syncwarp();
        rows.see_keys(slot, first + (warp + tile * kWarps) * C::kKeys, tile < whole, shared);
        __syncwarp();
        if (next < tiles) copier.copy(p, false, page, key, last, start, next < whole, slot, shared);
        end_group();
        await_groups<2 * kStages - 1>();
        __syncwarp();
        rows.add_values(slot, shared);
        __syncwarp();
        if (next < tiles) copier.copy(p, true, page, key, last, start, next < whole, slot, shared);
        end_group();
        if ((i + kStages + 1) % C::kTilesPlaced == 0) {
          key += C::kTilesPlaced * kWarps * C::kKeys;
          page = page_of(p, table, key, last);
        }
      }
    }
  }
};

// A part's result from what the warps left; of a tile with several parts into memory, and that of all of them from
// there if this is the last.
template <class C>
__device__ __forceinline__ void finish(const Attention& p, int part, int g, int first, Shared<C>& shared) {
  const Line line(load_line(p, part));
  constexpr int kUnits = C::kWidth / 4;
  const int here = rows_here<C>(p, line, first);
  for (int unit = threadIdx.x; unit < here * kUnits; unit += kThreads) {
    const int row = unit / kUnits, d = unit % kUnits * 4;
    if (d >= p.width) continue;
    Merged merged = merge_warps<C>(shared, row, d);
    if (p.v.scales) merged.scale(p.v.scales[g]);
    if (line.splits == 1) {
      write_out<C>(p, line, g, first + row, d, merged);
    } else {
      const int64_t at = (int64_t(part) * p.groups + g) * p.rows + first + row;
      *reinterpret_cast<float4*>(p.sums + at * p.pitch + d) = merged.acc;
      if (d == 0) p.statistics[at] = make_float2(merged.largest, merged.total);
    }
  }
  if (line.splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* counter = p.counters() + int64_t(line.first_part) * p.groups + g;
    const unsigned most = line.splits * p.row_tiles - 1;
    shared.last = atomicInc(reinterpret_cast<unsigned*>(counter), most) == most;
    __threadfence();
  }
  __syncthreads();
  if (shared.last) merge_parts<C>(p, line, g, shared);
}

// A block goes through a range of parts, for one key/value head and some rows of each tile. While it goes through the
// keys of one, it looks up where those of the next stand, and it copies the first of them before it writes the result.
template <class C>
__global__ void __launch_bounds__(kThreads, C::kBlocks) paged_attention_kernel(const __grid_constant__ Attention p) {
  Shared<C>& shared = *launched_memory<Shared<C>>();
  take_over();
  const int g = blockIdx.x % p.groups, row = blockIdx.y * C::kRows;
  int number = load_range(p, blockIdx.x / p.groups);
  int part = __shfl_sync(kAll, number, kFields);
  const int end = part + __shfl_sync(kAll, number, kFields + 1);
  if (part == end) return;
  const Copier<C> copier(p, g, shared);
  Upcoming<C> upcoming(p, number);
  Queries<C> q;
  Part<C> own(p, Line(number), g, row, copier, upcoming, q, shared);
  if (part + 1 < end) number = load_line(p, part + 1);
  own.share(p, g, q, shared);
  for (;; ++part) {
    __syncthreads();
    const bool more = part + 1 < end;
    if (more) {
      upcoming = Upcoming<C>(p, number);
      if (part + 2 < end) number = load_line(p, part + 2);
    }
    std::conditional_t<C::kPlain, PlainRows<C>, TensorRows<C>> rows(shared);
    own.attend(p, copier, rows, shared);
    rows.leave(shared, threadIdx.x / kWarp);
    if (C::kApart && more) own = Part<C>(p, Line(load_line(p, part + 1)), g, row, copier, upcoming, q, shared);
    __syncthreads();
    finish<C>(p, part, g, row, shared);
    if (!more) return;
    if (!C::kApart) {
      __syncthreads();
      own = Part<C>(p, Line(load_line(p, part + 1)), g, row, copier, upcoming, q, shared);
    }
    own.share(p, g, q, shared);
  }
}

template <class C>
void run(Attention& p, Address stream) {
  p.row_tiles = ceil_div(p.rows, C::kRows);
  const int shared = sizeof(Shared<C>);
  check(cudaFuncSetAttribute(paged_attention_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "paged_attention");
  launch(paged_attention_kernel<C>, dim3(p.ranges * p.groups, p.row_tiles), kThreads, shared, true, stream, p);
}

template <class T, bool A = false>
void run_width(Attention& p, Address stream) {
  constexpr int kMost = std::is_same_v<T, float> ? 1 : 2;  // tiles of rows
  const bool many = p.rows > 8;
  if (p.width > 128) run<Setting<T, 256, 1, A>>(p, stream);
  else if (p.width > 64) many ? run<Setting<T, 128, kMost, A>>(p, stream) : run<Setting<T, 128, 1, A>>(p, stream);
  else many ? run<Setting<T, 64, kMost, A>>(p, stream) : run<Setting<T, 64, 1, A>>(p, stream);
}

}  // namespace

void attention_schedule(Address k_lens, Address rows, Address cu_seqlens, Address schedule, int lanes, int queries,
                        int lines, int groups, int block_q, int unit, int ranges, int least, Address stream) {
  if (ranges > kMostRanges) throw std::invalid_argument("attention_schedule: expected at most 768 ranges");
  const Plan p{pointer<int>(k_lens), pointer<int64_t>(rows), pointer<int>(cu_seqlens), pointer<int>(schedule), lanes,
               queries, lines, groups, block_q, unit, ranges, least};
  launch(attention_schedule_kernel, 1, kScheduleThreads, 0, true, stream, p);
}

void paged_attention(Address q, Address k, Address v, Address page_table, Address schedule, Address positions,
                     Address k_scale, Address v_scale, Address out, Address sums, Address statistics, double scale,
                     int lines, int ranges, int64_t pages, int table_rows, int max_pages, int page_size, int heads,
                     int groups, int width, int block_q, std::array<int64_t, 3> of_q, std::array<int64_t, 4> of_k,
                     std::array<int64_t, 4> of_v, int positions_dtype, int dtype, int cache_dtype, Address stream) {
  const int item = cache_dtype == kE4M3 ? 1 : cache_dtype == kF32 ? 4 : 2, group = heads / groups;
  const auto even = [&](int64_t elements) { return elements * item % 16 == 0; };
  const auto units = [&](int64_t elements) { return unsigned(elements * item / 16); };
  bool wide = of_k[3] == 1 && of_v[3] == 1 && even(width) && (k | v) % 16 == 0;
  for (int i = 0; i < 3; ++i) wide = wide && even(of_k[i]) && even(of_v[i]);
  wide = wide && pages * std::max(of_k[0], of_v[0]) * item <= int64_t(16) << 32;  // what 32 bits can count
  Attention p{pointer<void>(q),
              {pointer<char>(k), pointer<float>(k_scale), of_k[0] * item, of_k[1] * item, of_k[2] * item, of_k[3],
               units(of_k[0]), units(of_k[1])},
              {pointer<char>(v), pointer<float>(v_scale), of_v[0] * item, of_v[1] * item, of_v[2] * item, of_v[3],
               units(of_v[0]), units(of_v[1])},
              pointer<int>(page_table), pointer<int>(schedule), pointer<void>(positions), pointer<void>(out),
              pointer<float>(sums), pointer<float2>(statistics), of_q[0], of_q[1], of_q[2],
              float(scale * 1.4426950408889634), lines, ranges, table_rows, max_pages,
              int(std::min<int64_t>(int64_t(max_pages) * page_size, 0x7fffffff)), groups, width, ceil_div(width, 4) * 4,
              block_q, block_q * group, 1, positions_dtype, dtype, cache_dtype, Divisor(page_size), Divisor(group)};
  if (!wide || (cache_dtype != dtype && (cache_dtype != kE4M3 || dtype == kF32))) run_width<float, true>(p, stream);
  else if (cache_dtype == kE4M3) run_width<uint8_t>(p, stream);
  else with_float(dtype, [&](auto t) { run_width<decltype(t)>(p, stream); });
}

}  // namespace mor
