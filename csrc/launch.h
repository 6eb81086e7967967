// The launchers, as bind.cpp shows them to Python: one or a few a file of kernels. Addresses are of device memory, 0
// for none; sizes and strides count elements. Each launches on `stream` and returns at once; it throws if it can't.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace mor {

using Address = std::uintptr_t;

enum Dtype { kF32 = 0, kBF16 = 1, kF16 = 2, kE4M3 = 3 };
enum Activation { kNone = 0, kSigmoid = 1, kTanh = 2 };
enum Residual { kBlock = 0, kDelta = 1, kPlain = 2 };

// device.cu
std::string device_refusal();  // why no kernel of this build can run on the current device; empty if they can

// gather.cu
void gather(Address x, Address indices, Address rows, int64_t n, int64_t length, int64_t x_m, int64_t x_d, int width,
            int dtype, Address stream);
void gather_backward(Address d_rows, Address indices, Address inverse, Address d_x, int64_t n, int64_t length,
                     int width, int dtype, Address stream);
void invert(Address indices, Address inverse, int64_t batch, int64_t k, int64_t length, Address stream);

// route_backward.cu; partial is (blocks, width), and blocks 0 if there are no rows
int route_backward_blocks(int64_t rows);
void route_backward(Address d_rows, Address d_gates, Address d_logits, Address x, Address weight, Address logits,
                    Address candidates, Address of_candidates, Address seqlens, Address indices, Address of_indices,
                    Address d_x, Address d_weight, Address d_ready, Address partial, int blocks, int batch, int length,
                    int scored, int k, int width, int64_t x_b, int64_t x_n, int64_t x_d, int seqlens_dtype,
                    int activation, double alpha, double temperature, int dtype, int weight_dtype, Address stream);

// scatter_back.cu; without an inverse, in place: out is x
void scatter_back(Address x, Address update, Address indices, Address inverse, Address gates, Address out,
                  int batch, int length, int k, int64_t x_b, int64_t x_n, int64_t x_d, int64_t f_b, int64_t f_k,
                  int64_t f_d, int width, int residual, int dtype, int update_dtype, Address stream);
void scatter_back_backward(Address d_out, Address x, Address update, Address indices, Address inverse, Address gates,
                           Address d_x, Address d_update, Address d_gates, int batch, int length, int k, int64_t y_b,
                           int64_t y_n, int64_t y_d, int64_t x_b, int64_t x_n, int64_t x_d, int64_t f_b, int64_t f_k,
                           int64_t f_d, int width, int residual, int dtype, int update_dtype, Address stream);

// decode_linear.cu; y is (n, columns), squares (n, partial) and next_squares (n, ceil(columns / 32)), all contiguous. A
// block has of_block rows of the weight (gated: gates and values, for half as many columns of y) and one of the parts
// of K; in its ring of shared memory there is room for so many KB of weight and x. 0 for each: as is best.
void decode_linear(Address x, Address weight, Address norm_weight, Address squares, Address residual, Address next_gain,
                   Address out, Address scaled, Address next_squares, double eps, int n, int k, int columns,
                   int partial, int64_t x_n, int64_t weight_n, int64_t residual_n, bool gated, bool prefetch,
                   int of_block, int parts, int room, int dtype, Address stream);
// The same into heads of 64 or 128 columns, bf16: q is (n, q_heads, width), and to are the strides (page, slot, head)
// of the caches.
void decode_qkv(Address x, Address weight, Address norm_weight, Address squares, Address slots, Address positions,
                Address q, Address k_cache, Address v_cache, double eps, double theta, int n, int k, int q_heads,
                int heads, int width, int page_size, int partial, int64_t slots_there, int64_t x_n, int64_t weight_n,
                std::array<int64_t, 6> to, bool prefetch, int parts, int room, int positions_dtype, Address stream);

// depth_step.cu
void depth_step(Address x, Address update, Address logits, Address recursions, Address weight, Address last,
                Address replayed, Address aux_weight, Address goes_on, int64_t n, int64_t routers, int width,
                int64_t x_n, int64_t x_d, int64_t f_n, int64_t f_d, int64_t logits_n, int activation, double alpha,
                double temperature, int residual, int dtype, int update_dtype, int weight_dtype, int aux_dtype,
                Address stream);

// route.cu; of the words, batch (scored + k) int32, the first become the logits; rows of in_flight bytes wait in L2 for
// their copying; weight is of x's dtype or float32
void route(Address x, Address weight, Address ready, Address candidates, Address seqlens, Address recorded,
           Address rows, Address indices, Address gates, Address words, Address counts,
           int batch, int length, int scored, int k, int width, int64_t x_b, int64_t x_n, int64_t x_d,
           int seqlens_dtype, int activation, double alpha, double temperature, double largest, int64_t in_flight,
           int dtype, int weight_dtype, Address stream);

// sample.cu; temperature, top_p and min_p are float64; row is the stride of a lane's logits, of are those of the
// settings, and most the bytes of shared memory that it may ask for
void sample(Address logits, Address temperature, Address top_k, Address top_p, Address min_p, Address seed,
            Address position, Address tokens, int64_t n, int vocabulary, int64_t row,
            std::array<int64_t, 6> of, int most, int dtype, Address stream);

// rope.cu; tokens stand at (batch, length)
void rope(Address q, Address k, Address positions, Address out_q, Address out_k, int64_t batch, int64_t length,
          int q_heads, int k_heads, int half, double theta, bool inverse, int64_t p_b, int64_t p_n, int64_t q_b,
          int64_t q_n, int64_t q_h, int64_t k_b, int64_t k_n, int64_t k_h, int positions_dtype, int dtype,
          Address stream);

// kv.cu; from are the strides (token, head, dimension) of q, k, v, and to those (page, slot, head, dimension) of the
// caches; k and v of 0 are zeros
void kv_append(Address q, Address k, Address v, Address slots, Address positions, Address out_q, Address k_cache,
               Address v_cache, Address k_scale, Address v_scale, double theta, int64_t tokens, int64_t slots_there,
               int q_heads, int heads, int width, int page_size, std::array<int64_t, 9> from,
               std::array<int64_t, 8> to, int positions_dtype, int dtype, int cache_dtype, Address stream);
void kv_merge(Address k, Address v, Address k_old, Address v_old, Address slots, Address inverse, Address k_out,
              Address v_out, int64_t n, int64_t length, int width, int new_dtype, int dtype, Address stream);
void kv_lookup(Address k, Address v, Address page_table, Address cu_seqlens, Address k_out, Address v_out, int64_t
               total, int64_t rows, int64_t max_pages, int64_t pages, int64_t k_page, int64_t k_slot, int64_t v_page,
               int64_t v_slot, int page_size, int width, int item_size, Address stream);
void kv_lookup_backward(Address d_k, Address d_v, Address entries, Address first, Address cu_seqlens, Address k_out,
                        Address v_out, int64_t slots, int64_t max_pages, int page_size, int width, int dtype,
                        Address stream);

// paged_attention.cu; of a schedule of `lines` lines and `ranges` ranges (ops/paged_attention/_parts.py), and strides
// (token, head, dimension) of q and (page, slot, head, dimension) of the caches; sums and statistics hold a row's (the
// width up to the next multiple of 4) and 2 numbers for each line, key/value head and row of a tile
void attention_schedule(Address k_lens, Address rows, Address cu_seqlens, Address schedule, int lanes, int queries,
                        int lines, int groups, int block_q, int unit, int ranges, int least, Address stream);
void paged_attention(Address q, Address k, Address v, Address page_table, Address schedule, Address positions,
                     Address k_scale, Address v_scale, Address out, Address sums, Address statistics, double scale,
                     int lines, int ranges, int64_t pages, int table_rows, int max_pages, int page_size, int heads,
                     int groups, int width, int block_q, std::array<int64_t, 3> of_q, std::array<int64_t, 4> of_k,
                     std::array<int64_t, 4> of_v, int positions_dtype, int dtype, int cache_dtype, Address stream);

}  // namespace mor
