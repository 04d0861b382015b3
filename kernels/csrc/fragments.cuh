// How tiles of keys and values in shared memory become operands of mma.m16n8k16, and the online softmax between them.
#pragma once
#include "common.cuh"

// Layout of a tile row in shared memory: an odd number of 16-byte chunks.
template <typename KV, int HEAD_DIM>
struct TileRow {
  static constexpr int CHUNK = 16 / sizeof(KV);         // elements
  static constexpr int CHUNKS = HEAD_DIM / CHUNK;       // of data
  static constexpr int ROW = (CHUNKS | 1) * CHUNK;      // elements, padding included
  static_assert(HEAD_DIM % 16 == 0, "an mma takes 16 dimensions");
};

template <int HEAD_DIM>
struct Softmax;

template <typename T, typename KV, int HEAD_DIM>
struct Fragments;

// Keys and values in the type of the computation: ldmatrix makes fragments of them directly.
template <typename T, int HEAD_DIM>
struct Fragments<T, T, HEAD_DIM> : TileRow<T, HEAD_DIM> {
  using TileRow<T, HEAD_DIM>::ROW;
  // Column, in a step of 16 dimensions, of the pair in register j of a query fragment.
  static __device__ __forceinline__ int query_column(int lane, int j) { return lane % 4 * 2 + 8 * (j >> 1); }
  // Dimension of element e of a lane's pair in output tile n.
  static __device__ __forceinline__ int out_column(int lane, int n, int e) { return n * 8 + lane % 4 * 2 + e; }

  // 16 rows of queries x 16 dimensions from dimension 16k on, out of shared memory.
  static __device__ __forceinline__ void load_queries(u32 (&a)[4], const T* rows, int lane, int k) {
    ldmatrix_x4(a, rows + lane % 16 * ROW + k * 16 + lane / 16 * 8);
  }
  // 16 keys x 16 dimensions from dimension 16k on: b[0], b[1] for keys 0..7, b[2], b[3] for keys 8..15.
  static __device__ __forceinline__ void load_keys(u32 (&b)[4], const T* tile, int lane, int k) {
    ldmatrix_x4(b, tile + (lane % 8 + lane / 16 * 8) * ROW + k * 16 + lane / 8 % 2 * 8);
  }
  // Of each TILE of 16 rows: out[16 rows][HEAD_DIM] += weights[16 rows][16 keys] * values[16 keys][HEAD_DIM].
  template <int TILES>
  static __device__ __forceinline__ void accumulate(Softmax<HEAD_DIM> (&rows)[TILES], const u32 (&weights)[TILES][4],
                                                    const T* tile, int lane) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
      u32 b[4];
      ldmatrix_x4_transposed(b, tile + lane % 16 * ROW + d * 16 + lane / 16 * 8);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        mma_16816<T>(rows[t].out[2 * d], weights[t], b[0], b[1]);
        mma_16816<T>(rows[t].out[2 * d + 1], weights[t], b[2], b[3]);
      }
    }
  }
  // Row h of the lane's two, times `factor`.
  static __device__ __forceinline__ void store(T* to, const float (&out)[HEAD_DIM / 8][4], int h, float factor,
                                               int lane) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      *reinterpret_cast<u32*>(to + out_column(lane, n, 0)) =
          From<T>::pair(out[n][2 * h] * factor, out[n][2 * h + 1] * factor);
    }
  }
};

// fp8 keys and values, computed in T. Sums over dimensions may be taken in any order, so a lane's keys are four
// neighbouring bytes and the query's columns follow; ldmatrix moves fp8 values in pairs of neighbouring dimensions, so
// of two output tiles one holds the even dimensions of sixteen, the other the odd ones.
template <typename T, int HEAD_DIM>
struct Fragments<T, __nv_fp8_e4m3, HEAD_DIM> : TileRow<__nv_fp8_e4m3, HEAD_DIM> {
  using TileRow<__nv_fp8_e4m3, HEAD_DIM>::ROW;
  static __device__ __forceinline__ int query_column(int lane, int j) { return lane % 4 * 4 + 2 * (j >> 1); }
  static __device__ __forceinline__ int out_column(int lane, int n, int e) {
    return n / 2 * 16 + (lane % 4 * 2 + e) * 2 + n % 2;
  }
  static __device__ __forceinline__ void load_queries(u32 (&a)[4], const T* rows, int lane, int k) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const T* at = rows + (lane / 4 + 8 * (j & 1)) * TileRow<T, HEAD_DIM>::ROW + k * 16 + query_column(lane, j);
      a[j] = *reinterpret_cast<const u32*>(at);
    }
  }
  static __device__ __forceinline__ void load_keys(u32 (&b)[4], const __nv_fp8_e4m3* tile, int lane, int k) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const auto* at = tile + (lane / 4 + 8 * half) * ROW + k * 16 + lane % 4 * 4;
      const u32 four = *reinterpret_cast<const u32*>(at);
      b[2 * half] = From<T>::fp8_pair(static_cast<u16>(four));
      b[2 * half + 1] = From<T>::fp8_pair(static_cast<u16>(four >> 16));
    }
  }
  template <int TILES>
  static __device__ __forceinline__ void accumulate(Softmax<HEAD_DIM> (&rows)[TILES], const u32 (&weights)[TILES][4],
                                                    const __nv_fp8_e4m3* tile, int lane) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d += 2) {
      u32 r[4];  // keys 0..7 and 8..15 of dimensions 16d.., then of 16(d + 1).., where a head has an odd number, again
      const int dimension = min(d + lane / 16, HEAD_DIM / 16 - 1) * 16;
      ldmatrix_x4_transposed(r, tile + lane % 16 * ROW + dimension);
#pragma unroll
      for (int i = 0; i < 2 && d + i < HEAD_DIM / 16; i++) {
        u32 even[2], odd[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 low = From<T>::fp8_pair(static_cast<u16>(r[2 * i + half]));
          const u32 high = From<T>::fp8_pair(static_cast<u16>(r[2 * i + half] >> 16));
          even[half] = (low & 0xffff) | high << 16;
          odd[half] = low >> 16 | (high & 0xffff0000);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          mma_16816<T>(rows[t].out[2 * (d + i)], weights[t], even[0], even[1]);
          mma_16816<T>(rows[t].out[2 * (d + i) + 1], weights[t], odd[0], odd[1]);
        }
      }
    }
  }
  static __device__ __forceinline__ void store(T* to, const float (&out)[HEAD_DIM / 8][4], int h, float factor,
                                               int lane) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        *reinterpret_cast<u32*>(to + out_column(lane, n, e)) =
            From<T>::pair(out[n][2 * h + e] * factor, out[n + 1][2 * h + e] * factor);
      }
    }
  }
};

// Online softmax (Milakov and Gimelshein 2018) of two rows a lane, r and r + 8, which four lanes share.
template <int HEAD_DIM>
struct Softmax {
  float out[HEAD_DIM / 8][4];     // not yet divided by the sum
  float max[2] = {MASKED, MASKED};
  float sum[2] = {0, 0};          // of this lane's keys
  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
  }

  // Takes in 16 * STEPS scores in units of log2(e); gives the weights of their values as mma operands.
  template <typename T, int STEPS>
  __device__ __forceinline__ void update(const float (&s)[2 * STEPS][4], u32 (&weights)[STEPS][4]) {
    float larger[2] = {max[0], max[1]};
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++) {
      larger[0] = fmaxf(larger[0], fmaxf(s[n][0], s[n][1]));
      larger[1] = fmaxf(larger[1], fmaxf(s[n][2], s[n][3]));
    }
    larger[0] = row_max(larger[0]);
    larger[1] = row_max(larger[1]);
    if (__any_sync(ALL_LANES, larger[0] > max[0] || larger[1] > max[1])) {  // seldom, after the first tiles
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float factor = fast_exp2(max[h] - larger[h]);
        max[h] = larger[h];
        sum[h] *= factor;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
          out[n][2 * h] *= factor;
          out[n][2 * h + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++) {
      // A row that has seen masked scores alone gives them weight 1; its first real score multiplies that by 0.
      const float w0 = fast_exp2(s[n][0] - max[0]), w1 = fast_exp2(s[n][1] - max[0]);
      const float w2 = fast_exp2(s[n][2] - max[1]), w3 = fast_exp2(s[n][3] - max[1]);
      sum[0] += w0 + w1;
      sum[1] += w2 + w3;
      weights[n / 2][n % 2 * 2] = From<T>::pair(w0, w1);
      weights[n / 2][n % 2 * 2 + 1] = From<T>::pair(w2, w3);
    }
  }
};
