// A linear layer of few rows, with the norm before it and what follows it, in one pass over its weight:
//
//   y = rstd (x gain) W^T,  rstd = (mean x^2 + eps)^(-1/2);  then silu(gates) values, + residual, or heads into a cache
//
// What there is to do is to bring the weight from memory, by all multiprocessors at once. A block has some rows of it,
// which are columns of y, all rows of x (or a tile of them), and a part of K. The parts of K of a tile of y are the
// blocks of a cluster: each leaves its sums in its shared memory, reads everyone's of a share of the tile, adds them up
// in the order of the parts and writes the result. Neither the order of the sums of a row nor how the work is split
// depends on the other rows or on how many there are.
//
// A norm can be left to the neighbors, since y is linear in rstd: the layer before writes its rows times the gains and
// sums of their squares, over 32 columns each, and this one multiplies its result.
//
// The tensor cores get the weight as the side of 16 and rows of x as the side of 8. Sums of squares are the diagonal of
// x x^T, for which x is in registers already.
#include <limits>

#include "instructions.cuh"
#include "rotary.cuh"

namespace mor {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kChunk = 64;         // of K, that is copied and multiplied at once
constexpr int kLine = 2 * kChunk;  // bytes of it, of a row
constexpr int kRing = 98 * 1024;   // bytes of chunks, unless the caller says: the next kernel's blocks have theirs, too
constexpr int kMostStages = 8;     // chunks there at once
constexpr int kMostParts = 8;      // blocks of a cluster, which every Hopper GPU can launch
constexpr int kUnit = 4;           // columns that a thread writes at once
constexpr int kOfSquares = 32;     // columns of y whose squares are summed up
constexpr int kOfRow = 8;          // threads that do so, and that add up such sums
static_assert(kOfSquares == kUnit * kOfRow);

struct Cache {
  void* x;
  int64_t page, slot, head;  // strides
};

struct Linear {
  const void *x, *weight, *gain, *residual, *next_gain;
  void *out, *scaled;
  const float* squares;  // (n, partial): of the rows that x was before it was multiplied by gains
  float* next_squares;
  int64_t x_n, weight_n, residual_n;
  // bytes: to the rows of the weight of a thread's next copy, from the first half's to the other's, and to the rows of x
  int64_t further_column, second_half, further_row;
  int n, k, columns;        // columns of y
  int chunks, each, parts;  // of K: chunks, those of a part, and parts
  int partial, room, stages;  // bytes of the ring; chunks in it
  bool gated, prefetch, wide;
  float of_k, eps;  // 1 / k
  // where y is heads
  const int64_t* slots;
  const void* positions;
  Cache k_cache, v_cache;
  int64_t slots_there;
  Divisor page_size{1};
  int q_heads, heads, positions_dtype, behind;  // bytes of the ring and the sums, which share theirs
  double log2_step;
};

// What is compiled: rows of the weight and of x that a block has, whether there is a norm, and whether y is heads of as
// many columns.
template <class T, int C, int N, bool G, bool H = false>
struct Setting {
  using Number = T;
  static constexpr int kColumns = C, kRows = N;
  static constexpr bool kNorm = G, kHeads = H;
  static constexpr int kAcross = std::min(N / 16, C == 128 ? 2 : 4);  // warps side by side over the rows of x
  static constexpr int kAlong = std::min(kWarps / kAcross, C / 16);   // and over the columns
  static constexpr int kTall = C / 16 / kAlong, kPairs = N / 16 / kAcross;  // tiles of 16 that a warp has
  static constexpr int kUnrolled = H && kTall * kPairs > 4 ? 2 : 4;  // steps; heads take registers meanwhile
  static constexpr int kStageBytes = (C + N + G) * kLine;
  static constexpr int kPitch = C + 4;  // of sums; behind a row's, its sum of squares
  static constexpr int kSumBytes = N * kPitch * 4;
  static constexpr int kRstdBytes = G ? 0 : N * 4, kBehind = kRstdBytes + (H ? sizeof(Frequencies) : 0);
  static_assert(kPairs <= kAlong && kSumBytes <= kRing);
};

// What of a chunk a thread copies: the same 16 bytes of every 32nd row, zeros where there is no such row or no more of
// it. Units of 16 bytes change places within a row, so that those of neighbouring rows lie in different banks.
template <class C>
struct Copier {
  using T = typename C::Number;
  static constexpr int kUnits = kLine / 16, kTogether = kThreads / kUnits;
  static constexpr int kColumnCopies = C::kColumns / kTogether, kRowCopies = ceil_div(C::kRows, kTogether);
  static constexpr int kFirst = std::max(kColumnCopies / 2, 1);  // copies of gates, or of the first half
  static constexpr int kHalf = C::kColumns / 2;
  const Linear& p;
  const char *weight, *x, *gain;        // the thread's, of its first row
  int row, k, columns_left, rows_left;  // from the thread's first on
  unsigned to;

  __device__ __forceinline__ Copier(const Linear& p, int tile, char* memory) : p(p) {
    const int unit = threadIdx.x % kUnits;
    row = threadIdx.x / kUnits;
    to = shared_address(memory) + row * kLine + (unit ^ row % kUnits) * 16;
    const int64_t line = p.weight_n * sizeof(T);
    int first = tile * (p.gated ? kHalf : C::kColumns) + (p.gated ? row % kHalf : row);
    columns_left = p.columns - first;
    if (p.gated && row >= kHalf) first += p.columns;
    const int offset = unit * 16;
    weight = static_cast<const char*>(p.weight) + first * line + offset;
    const int nth = blockIdx.y * C::kRows + row;
    rows_left = p.n - nth;
    x = static_cast<const char*>(p.x) + nth * p.x_n * sizeof(T) + offset;
    gain = static_cast<const char*>(p.gain) + offset;
    k = p.k - unit * kWide<T>;
  }

  __device__ __forceinline__ void columns(int chunk, int slot) const {
    const int64_t at = int64_t(chunk) * kLine;
    const bool inside = chunk * kChunk < k;
    const unsigned stage = to + slot * C::kStageBytes;
#pragma unroll
    for (int i = 0; i < kColumnCopies; ++i)
      copy_async_or_clear(stage + i * kTogether * kLine, weight + at + column(i), inside && there(i));
    if (C::kNorm && row == 0) copy_async_or_clear(stage + (C::kColumns + C::kRows) * kLine, gain + at, inside);
  }

  __device__ __forceinline__ void rows(int chunk, int slot) const {
    const int64_t at = int64_t(chunk) * kLine;
    const bool inside = chunk * kChunk < k;
    const unsigned stage = to + slot * C::kStageBytes + C::kColumns * kLine;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const bool there = inside && i * kTogether < rows_left;
      if (C::kRows >= kTogether || row < C::kRows)
        copy_async_or_clear(stage + i * kTogether * kLine, x + at + i * p.further_row, there);
    }
  }

  // Chunks that the ring has no room for yet, into the L2 cache.
  __device__ __forceinline__ void request(int first, int end) const {
    const int unit = threadIdx.x % kUnits;
#pragma unroll 1
    for (int chunk = first + unit; chunk < end; chunk += kUnits)
#pragma unroll
      for (int i = 0; i < kColumnCopies; ++i)
        if (there(i)) request_line(weight + int64_t(chunk) * kLine - unit * 16 + column(i));
  }

 private:
  __device__ __forceinline__ int64_t column(int i) const {
    return i % kFirst * p.further_column + (i < kFirst ? 0 : p.second_half);
  }

  __device__ __forceinline__ bool there(int i) const {  // from gates to values no column is further
    return i % kFirst * kTogether + (i < kFirst || p.gated ? 0 : kHalf) < columns_left;
  }
};

// A warp's part of a tile: lane 4g + t has, of columns 16i + g and 16i + g + 8, rows 2t and 2t + 1 of each 8.
template <class C>
struct Sums {
  using T = typename C::Number;
  float acc[C::kTall][2 * C::kPairs][4]{};
  float squares[2][4]{};  // of x x^T, 16 rows
  int along, across;      // of the warps
  unsigned columns, rows;

  __device__ __forceinline__ explicit Sums(const char* memory) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    along = warp / C::kAcross, across = warp % C::kAcross;
    const unsigned first = shared_address(memory);
    columns = first + (along * C::kTall * 16 + lane % 16) * kLine + (lane / 16 ^ lane % 8) * 16;
    const int row = C::kColumns + across * C::kPairs * 16 + lane / 16 * 8 + lane % 8;
    rows = first + row * kLine + (lane / 8 % 2 ^ lane % 8) * 16;
  }

  // Warps that nothing is left for only copy.
  __device__ __forceinline__ bool works() const { return along < C::kAlong; }

  __device__ __forceinline__ void add(const char* memory, int slot) {
    const char* gains = memory + slot * C::kStageBytes + (C::kColumns + C::kRows) * kLine + threadIdx.x % 4 * 4;
#pragma unroll C::kUnrolled
    for (int step = 0; step < kChunk / 16; ++step) {
      unsigned w[C::kTall][4], gain[2];
      const unsigned of_columns = (columns + slot * C::kStageBytes) ^ step * 32;
      const unsigned of_rows = (rows + slot * C::kStageBytes) ^ step * 32;
#pragma unroll
      for (int i = 0; i < C::kTall; ++i) load_matrices(w[i], of_columns + i * 16 * kLine);
      if constexpr (C::kNorm) {
#pragma unroll
        for (int i = 0; i < 2; ++i) gain[i] = *reinterpret_cast<const unsigned*>(gains + step * 32 + i * 16);
      }
#pragma unroll
      for (int pair = 0; pair < C::kPairs; ++pair) {
        unsigned x[4];  // of row g, 8 of K and the next 8, and of row g + 8: pairs of registers, as an instruction has
        load_matrices(x, of_rows + pair * 16 * kLine);
        if constexpr (C::kNorm) {
          if (pair == along) {
            const unsigned tall[4] = {x[0], x[2], x[1], x[3]};
            multiply_add<T>(squares[0], tall, x[0], x[1]), multiply_add<T>(squares[1], tall, x[2], x[3]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = multiply_pairs<T>(x[i], gain[i % 2]);
        }
#pragma unroll
        for (int i = 0; i < C::kTall; ++i) {
          multiply_add<T>(acc[i][2 * pair], w[i], x[0], x[1]);
          multiply_add<T>(acc[i][2 * pair + 1], w[i], x[2], x[3]);
        }
      }
    }
  }

  // As rows of kPitch numbers.
  __device__ __forceinline__ void leave(float* sums) const {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    float* to = sums + (across * C::kPairs * 16 + 2 * t) * C::kPitch + along * C::kTall * 16 + g;
#pragma unroll
    for (int i = 0; i < C::kTall; ++i)
#pragma unroll
      for (int j = 0; j < 2 * C::kPairs; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[(8 * j + e % 2) * C::kPitch + 16 * i + e / 2 * 8] = acc[i][j][e];
    if (C::kNorm && along < C::kPairs && t == g / 2) {
      float* of_row = sums + ((across * C::kPairs + along) * 16 + g) * C::kPitch + C::kColumns;
      of_row[0] = g % 2 ? squares[0][1] : squares[0][0];
      of_row[8 * C::kPitch] = g % 2 ? squares[1][3] : squares[1][2];
    }
  }
};

// Four columns of a row of the tile. Where two belong together, gates and values or the halves of a head, the next lane
// has the other's.
template <class C>
struct Unit {
  using T = typename C::Number;
  static constexpr int kAhead = 4;  // parts
  static constexpr int kHalf = C::kColumns / 2, kUnits = C::kColumns / kUnit;  // of a row
  int nth, row, column, of_y;  // the row's number in the tile and of all; the column in a half, and of y
  bool there, second;          // of two
  Pack<T, kUnit> residual, next_gain;
  float4 x[kAhead];
  int64_t slot, position;

  __device__ __forceinline__ Unit(const Linear& p, int tile, int first_row, int unit, int end) : there(unit < end) {
    const int rest = unit % kUnits;
    nth = unit / kUnits, row = first_row + nth;
    second = paired(p) && rest % 2;
    column = (paired(p) ? rest / 2 : rest) * kUnit;
    of_y = tile * (p.gated ? kHalf : C::kColumns) + column;
    if (!there) return;
    if constexpr (C::kHeads) {
      if (tile < p.q_heads + p.heads) position = load_position(p.positions, p.positions_dtype, row);
      if (tile >= p.q_heads) slot = p.slots[row];
    } else {
      if (p.residual) load(p, static_cast<const T*>(p.residual) + row * p.residual_n, residual);
      if (p.next_gain) load(p, static_cast<const T*>(p.next_gain), next_gain);
    }
  }

  __device__ __forceinline__ static bool paired(const Linear& p) { return C::kHeads || p.gated; }

  // What the first parts have, without waiting for it.
  __device__ __forceinline__ void request(const Linear& p, unsigned sums) {
#pragma unroll
    for (int part = 0; part < kAhead; ++part) x[part] = load_of_cluster4(own(sums), part, there && part < p.parts);
  }

  // From all parts, in their order.
  __device__ __forceinline__ void add_up(const Linear& p, unsigned sums, const float* rstds, float (&y)[kUnit]) const {
    float4 others[kMostParts - kAhead];
    float of_part[kMostParts], squares = 0.0f;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      const bool read = there && part < p.parts;
      if (part >= kAhead) others[part - kAhead] = load_of_cluster4(own(sums), part, read);
      if (C::kNorm) of_part[part] = load_of_cluster(sums + (nth * C::kPitch + C::kColumns) * 4, part, read);
    }
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      const float4& of = part < kAhead ? x[part] : others[part - kAhead];
      y[0] += of.x, y[1] += of.y, y[2] += of.z, y[3] += of.w;
      if (C::kNorm) squares += of_part[part];
    }
    float rstd = 1.0f;
    if constexpr (C::kNorm) rstd = rsqrtf(squares * p.of_k + p.eps);
    else if (p.squares && there) rstd = rstds[nth];
#pragma unroll
    for (int e = 0; e < kUnit; ++e) y[e] *= rstd;
  }

  // By all lanes of a warp. Where two lanes have what belongs together, each works out half of both's columns.
  __device__ __forceinline__ void finish(const Linear& p, int tile, float (&y)[kUnit], const Frequencies* frequencies) {
    constexpr int kOwn = kUnit / 2;
    float a[kOwn], b[kOwn];
    if (paired(p)) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        const float other = __shfl_xor_sync(kAll, second ? y[e] : y[kOwn + e], 1);
        a[e] = second ? other : y[e], b[e] = second ? y[kOwn + e] : other;
      }
    }
    if constexpr (C::kHeads) {
      if (there && tile < p.q_heads + p.heads) {
        float cos[kOwn], sin[kOwn];
        angles(*frequencies, p.log2_step, column + (second ? kOwn : 0), position, cos, sin);
        turn_pairs(cos, sin, a, b);
      }
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        const float other = __shfl_xor_sync(kAll, second ? a[e] : b[e], 1);
        y[e] = second ? other : a[e], y[kOwn + e] = second ? b[e] : other;
      }
      if (there) write_head(p, tile, y);
    } else {
      if (p.gated) {  // the first lane has all of it, and writes
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
          y[e] = a[e] * activate(a[e], kSigmoid) * b[e];
          y[kOwn + e] = __shfl_xor_sync(kAll, y[e], 1);
        }
      }
      write(p, y, there && !second);
    }
  }

 private:
  __device__ __forceinline__ unsigned own(unsigned sums) const {
    return sums + (nth * C::kPitch + column + (second ? kHalf : 0)) * 4;
  }

  __device__ __forceinline__ void load(const Linear& p, const T* from, Pack<T, kUnit>& to) const {
    if (p.wide) {
      if (of_y < p.columns) to = *reinterpret_cast<const Pack<T, kUnit>*>(from + of_y);
    } else {
#pragma unroll
      for (int e = 0; e < kUnit; ++e)
        if (of_y + e < p.columns) to.at[e] = from[of_y + e];
    }
  }

  __device__ __forceinline__ void write(const Linear& p, void* out, const Pack<T, kUnit>& y) const {
    T* to = static_cast<T*>(out) + int64_t(row) * p.columns + of_y;
    if (p.wide) {
      if (of_y < p.columns) *reinterpret_cast<Pack<T, kUnit>*>(to) = y;
    } else {
#pragma unroll
      for (int e = 0; e < kUnit; ++e)
        if (of_y + e < p.columns) to[e] = y.at[e];
    }
  }

  // By all lanes of a warp, of which those that `writes` is true for have something to.
  __device__ __forceinline__ void write(const Linear& p, const float (&y)[kUnit], bool writes) const {
    Pack<T, kUnit> rounded;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) rounded.at[e] = from_float<T>(p.residual ? y[e] + to_float(residual.at[e]) : y[e]);
    if (writes) write(p, p.out, rounded);
    if (!p.next_gain) return;
    Pack<T, kUnit> scaled;
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      const float x = to_float(rounded.at[e]);
      scaled.at[e] = from_float<T>(x * to_float(next_gain.at[e]));
      if (of_y + e < p.columns) squares += x * x;
    }
    if (writes) write(p, p.scaled, scaled);
#pragma unroll
    for (int step = kOfRow / 2; step; step /= 2) squares += __shfl_xor_sync(kAll, squares, step);
    if (writes && of_y % kOfSquares == 0 && of_y < p.columns)
      p.next_squares[int64_t(row) * ceil_div(p.columns, kOfSquares) + of_y / kOfSquares] = squares;
  }

  // Tile h is head h of the queries, then the keys, then the values.
  __device__ __forceinline__ void write_head(const Linear& p, int tile, const float (&y)[kUnit]) const {
    int head = tile;
    T* to;
    if (head < p.q_heads) {
      to = static_cast<T*>(p.out) + (int64_t(row) * p.q_heads + head) * C::kColumns;
    } else {
      if (slot < 0 || slot >= p.slots_there) return;
      head -= p.q_heads;
      const Cache& cache = head < p.heads ? p.k_cache : p.v_cache;
      if (head >= p.heads) head -= p.heads;
      const int64_t page = p.page_size(slot);
      to = static_cast<T*>(cache.x) + page * cache.page + (slot - page * p.page_size.divisor) * cache.slot +
           head * cache.head;
    }
    store(to + column + (second ? kHalf : 0), y);
  }

  __device__ __forceinline__ static void store(T* to, const float (&y)[kUnit]) {
    *reinterpret_cast<Pack<T, kUnit>*>(to) =
        Pack<T, kUnit>{from_float<T>(y[0]), from_float<T>(y[1]), from_float<T>(y[2]), from_float<T>(y[3])};
  }
};

// Until no more than the last `groups` groups of the thread's copies are under way.
__device__ __forceinline__ void await_all_but(int groups) {
  static_assert(kMostStages == 8);
  switch (groups) {
    case 7: return await_groups<7>();
    case 6: return await_groups<6>();
    case 5: return await_groups<5>();
    case 4: return await_groups<4>();
    case 3: return await_groups<3>();
    case 2: return await_groups<2>();
    case 1: return await_groups<1>();
    default: await_groups<0>();
  }
}

// rstd of rows first to end of a tile, from the sums of their squares.
__device__ __forceinline__ void fill_rstd(const Linear& p, int first_row, int first, int end, float* rstd) {
  constexpr int kTogether = 8;  // sums that are under way
#pragma unroll 1
  for (int of_warp = first + threadIdx.x / kWarp * (kWarp / kOfRow); of_warp < end; of_warp += kThreads / kOfRow) {
    const int nth = of_warp + threadIdx.x % kWarp / kOfRow;
    const float* from = p.squares + int64_t(first_row + min(nth, end - 1)) * p.partial;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x % kOfRow; i < p.partial; i += kTogether * kOfRow) {
      float x[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) x[j] = i + j * kOfRow < p.partial ? from[i + j * kOfRow] : 0.0f;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) sum += x[j];
    }
#pragma unroll
    for (int step = kOfRow / 2; step; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (nth < end && threadIdx.x % kOfRow == 0) rstd[nth] = rsqrtf(sum * p.of_k + p.eps);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 2) decode_linear_kernel(const __grid_constant__ Linear p) {
  char* memory = launched_memory<char>();
  const int tile = blockIdx.x / p.parts, part = blockIdx.x - tile * p.parts, first_row = blockIdx.y * C::kRows;
  const int first = part * p.each, chunks = min(p.each, p.chunks - first);
  const Copier<C> copier(p, tile, memory);
  const int at_once = min(chunks, p.stages);
  if (p.prefetch) {
#pragma unroll 1
    for (int chunk = 0; chunk < at_once; ++chunk) copier.columns(first + chunk, chunk);
    copier.request(first + at_once, first + chunks);
  }
  float* rstd = reinterpret_cast<float*>(memory + p.behind);
  Frequencies* frequencies = nullptr;
  if constexpr (C::kHeads) {
    frequencies = reinterpret_cast<Frequencies*>(memory + p.behind + C::kRstdBytes);
    frequencies->fill(C::kColumns / 2, p.log2_step);
  }
  // In this order: a kernel that begins while this one runs reads ahead what the kernel before this one has written.
  await_previous();
  let_next_begin();
#pragma unroll 1
  for (int chunk = 0; chunk < p.stages; ++chunk) {
    if (chunk < at_once) {
      if (!p.prefetch) copier.columns(first + chunk, chunk);
      copier.rows(first + chunk, chunk);
    }
    end_group();
  }

  // The block's share of the tile, of whole warps, and what is added to it, while the copies are under way.
  const int units = min(p.n - first_row, C::kRows) * Unit<C>::kUnits;
  const int share = ceil_div(units, p.parts * kWarp) * kWarp, end = min(units, (part + 1) * share);
  int unit = part * share + threadIdx.x;
  Unit<C> next(p, tile, first_row, unit, end);
  if (!C::kNorm && p.squares)
    fill_rstd(p, first_row, part * share / Unit<C>::kUnits, ceil_div(end, Unit<C>::kUnits), rstd);

  Sums<C> sums(memory);
  int slot = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    await_all_but(chunk ? p.stages - 2 : p.stages - 1);
    __syncthreads();
    if (chunk) {
      const int further = chunk - 1 + p.stages, free = slot ? slot - 1 : p.stages - 1;  // where the one before was
      if (further < chunks) copier.columns(first + further, free), copier.rows(first + further, free);
      end_group();
    }
    if (sums.works()) sums.add(memory, slot);
    slot = slot + 1 == p.stages ? 0 : slot + 1;
  }

  __syncthreads();
  if (sums.works()) sums.leave(reinterpret_cast<float*>(memory));
  arrive_in_cluster();
  await_cluster();
  // What the next unit is added up from is under way while one is finished.
  const auto left = [&] { return unit / kWarp * kWarp < end; };
  if (left()) next.request(p, shared_address(memory));
#pragma unroll 1
  while (left()) {
    Unit<C> own = next;
    unit += kThreads;
    if (left()) next = Unit<C>(p, tile, first_row, unit, end), next.request(p, shared_address(memory));
    float y[kUnit]{};
    own.add_up(p, shared_address(memory), rstd, y);
    own.finish(p, tile, y, frequencies);
  }
  end_together();  // what others read stays until they have
}

template <class C>
void run(Linear p, Address stream) {
  const int64_t line = p.weight_n * sizeof(typename C::Number);
  p.further_column = Copier<C>::kTogether * line, p.second_half = (p.gated ? p.columns : C::kColumns / 2) * line;
  p.further_row = Copier<C>::kTogether * p.x_n * sizeof(typename C::Number);
  // Two at least, where one is filled while the other is multiplied. What was asked for is taken whole: if it is more
  // than half of what a multiprocessor has, none gets two blocks of this launch while another gets none.
  const int ring = p.room ? p.room : kRing;
  p.stages = std::min(p.each, std::clamp(ring / C::kStageBytes, 2, kMostStages));
  p.behind = std::max({p.stages * C::kStageBytes, C::kSumBytes, p.room / 128 * 128});
  const auto set = [](cudaFuncAttribute attribute, int value) {
    check(cudaFuncSetAttribute(decode_linear_kernel<C>, attribute, value), "decode_linear");
  };
  constexpr int kMost = std::max(std::min(kRing / C::kStageBytes, kMostStages) * C::kStageBytes, C::kSumBytes);
  set(cudaFuncAttributeMaxDynamicSharedMemorySize, std::max(p.behind, kMost) + C::kBehind);
  // or blocks of the next kernel, for which it is divided otherwise, couldn't be where this one's still are
  set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  const int tiles = ceil_div(p.columns, p.gated ? C::kColumns / 2 : C::kColumns);
  launch_clusters(decode_linear_kernel<C>, dim3(tiles * p.parts, ceil_div(p.n, C::kRows)), p.parts, kThreads,
                  p.behind + C::kBehind, true, stream, p);
}

// Parts of K, given how many there should be: none is empty, all but the last are of one length.
void split(Linear& p, int parts) {
  p.each = ceil_div(p.chunks, device().clusters ? std::clamp(parts, 1, std::min(kMostParts, p.chunks)) : 1);
  p.parts = ceil_div(p.chunks, p.each);
}

// What a multiprocessor copies if it has its share of the blocks, or one: what else a block does with a chunk is worth as
// much as another 64 rows of the weight, and its sums, which it leaves and others read, as much as 4 chunks of it. A part
// whose chunks have room in the ring for 64 rows of x needs no second round of copies, which would be worth a chunk.
int64_t cost(const Linear& p, int rows, int columns) {
  const int64_t blocks = int64_t(ceil_div(rows, columns)) * p.parts;
  const int further = p.each > kRing / ((columns + 64) * kLine);
  return std::max<int64_t>(blocks, device().multiprocessors) * ((p.each + further) * (columns + 64) + 4 * columns);
}

// Splits K; returns the rows of the weight that a block has. What isn't 0 was chosen by the caller. Clusters of 3, 5, 6
// or 7 blocks leave multiprocessors idle, of which a GPC has 16 or 18.
int choose(Linear& p, int rows, int columns, int parts) {
  int64_t least = std::numeric_limits<int64_t>::max();
  int best_columns = 0, best_parts = 0;
  for (int c : {128, 64, 32})
    for (int s = 1; s <= kMostParts; ++s) {
      if ((columns && c != columns) || (parts ? s != parts : s & (s - 1))) continue;
      split(p, s);
      if (const int64_t found = cost(p, rows, c); found < least) least = found, best_columns = c, best_parts = s;
    }
  if (!best_columns) throw std::invalid_argument("decode_linear: expected 32, 64 or 128 columns and at most 8 parts");
  split(p, best_parts);
  return best_columns;
}

template <class T, int C, bool G, bool H>
void run_rows(const Linear& p, Address stream) {
  if (p.n <= 16) run<Setting<T, C, 16, G, H>>(p, stream);
  else if (p.n <= 32) run<Setting<T, C, 32, G, H>>(p, stream);
  else if (p.n <= 64) run<Setting<T, C, 64, G, H>>(p, stream);
  else run<Setting<T, C, 128, G, H>>(p, stream);
}

Linear linear(Address x, Address weight, Address norm_weight, Address squares, Address out, double eps, int n, int k,
              int columns, int partial, int64_t x_n, int64_t weight_n, bool prefetch) {
  Linear p{};
  p.x = pointer<void>(x), p.weight = pointer<void>(weight), p.gain = pointer<void>(norm_weight);
  p.out = pointer<void>(out), p.x_n = x_n, p.weight_n = weight_n;
  p.n = n, p.k = k, p.columns = columns, p.chunks = ceil_div(k, kChunk);
  p.squares = pointer<float>(squares), p.partial = partial;
  p.prefetch = prefetch, p.of_k = 1.0f / k, p.eps = float(eps);
  return p;
}

template <class T, bool G>
void run_columns(const Linear& p, int columns, Address stream) {
  if (columns == 32) run_rows<T, 32, G, false>(p, stream);
  else if (columns == 64) run_rows<T, 64, G, false>(p, stream);
  else run_rows<T, 128, G, false>(p, stream);
}

}  // namespace

void decode_linear(Address x, Address weight, Address norm_weight, Address squares, Address residual, Address next_gain,
                   Address out, Address scaled, Address next_squares, double eps, int n, int k, int columns,
                   int partial, int64_t x_n, int64_t weight_n, int64_t residual_n, bool gated, bool prefetch,
                   int of_block, int parts, int room, int dtype, Address stream) {
  Linear p = linear(x, weight, norm_weight, squares, out, eps, n, k, columns, partial, x_n, weight_n, prefetch);
  p.residual = pointer<void>(residual), p.residual_n = residual_n, p.gated = gated;
  p.next_gain = pointer<void>(next_gain), p.scaled = pointer<void>(scaled);
  p.next_squares = pointer<float>(next_squares);
  p.wide = columns % kUnit == 0 && residual % 8 == 0 && residual_n % kUnit == 0 && next_gain % 8 == 0;
  p.room = room * 1024;
  of_block = choose(p, columns * (gated ? 2 : 1), of_block, parts);
  const bool norms = norm_weight || squares || next_gain;
  if (dtype == kF16 && !norms) run_columns<fp16, false>(p, of_block, stream);
  else if (dtype != kBF16) throw std::invalid_argument("decode_linear: expected bfloat16, or float16 without a norm");
  else if (norm_weight) run_columns<bf16, true>(p, of_block, stream);
  else run_columns<bf16, false>(p, of_block, stream);
}

void decode_qkv(Address x, Address weight, Address norm_weight, Address squares, Address slots, Address positions,
                Address q, Address k_cache, Address v_cache, double eps, double theta, int n, int k, int q_heads,
                int heads, int width, int page_size, int partial, int64_t slots_there, int64_t x_n, int64_t weight_n,
                std::array<int64_t, 6> to, bool prefetch, int parts, int room, int positions_dtype, Address stream) {
  const int columns = (q_heads + 2 * heads) * width;
  Linear p = linear(x, weight, norm_weight, squares, q, eps, n, k, columns, partial, x_n, weight_n, prefetch);
  p.slots = pointer<int64_t>(slots), p.positions = pointer<void>(positions), p.positions_dtype = positions_dtype;
  p.k_cache = {pointer<void>(k_cache), to[0], to[1], to[2]}, p.v_cache = {pointer<void>(v_cache), to[3], to[4], to[5]};
  p.slots_there = slots_there, p.page_size = Divisor(page_size), p.q_heads = q_heads, p.heads = heads;
  p.log2_step = log2_step(theta, width / 2);
  p.room = room * 1024;
  choose(p, columns, width, parts);
  if (norm_weight) width == 64 ? run_rows<bf16, 64, true, true>(p, stream) : run_rows<bf16, 128, true, true>(p, stream);
  else width == 64 ? run_rows<bf16, 64, false, true>(p, stream) : run_rows<bf16, 128, false, true>(p, stream);
}

}  // namespace mor
