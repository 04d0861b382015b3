// Paged causal attention as plainly as it can be written: what float32 models run on, and what the fast kernels are
// compared with where float64 is out of reach. grid (heads, tokens), one warp.
#include "common.cuh"
#include "params.cuh"

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(32) attn_reference(const PrefillParams p) {
  constexpr int EACH = ceil_div(HEAD_DIM, 32);  // dimensions a lane, the last one of some lanes empty
  const int head = blockIdx.x, token = blockIdx.y, lane = threadIdx.x;
  int row = 0;
  while (row + 1 < p.rows && p.query_starts[row + 1] <= token) row++;
  const int after = p.query_starts[row + 1] - token - 1;  // tokens of the row that this one does not see
  const int seen = p.contexts[row] - after;
  const int first = p.window > 0 ? max(0, seen - p.window) : 0;
  const int* table = p.tables + (p.slots ? p.slots[row] : row) * p.table_stride;
  const ScoreMap score(p.scale, p.cap);

  const T* query = static_cast<const T*>(p.query) + token * p.query_stride + static_cast<i64>(head) * HEAD_DIM;
  float q[EACH], out[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int d = lane + 32 * i;
    q[i] = d < HEAD_DIM ? to_float(query[d]) : 0.f;
    out[i] = 0;
  }
  float most = MASKED, sum = 0;
  for (int key = first; key < seen; key++) {
    const i64 place = table[key / p.block_tokens] * p.block_stride + head / p.group * p.head_stride +
                      static_cast<i64>(key % p.block_tokens) * HEAD_DIM;
    float dot = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int d = lane + 32 * i;
      if (d < HEAD_DIM) dot += q[i] * to_float(static_cast<const T*>(p.keys)[place + d]);
    }
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, bits);
    const float s = score(dot), larger = fmaxf(most, s);
    const float factor = fast_exp2(most - larger), weight = fast_exp2(s - larger);
    most = larger;
    sum = sum * factor + weight;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int d = lane + 32 * i;
      if (d < HEAD_DIM) out[i] = out[i] * factor + weight * to_float(static_cast<const T*>(p.values)[place + d]);
    }
  }
  T* to = static_cast<T*>(p.out) + token * p.out_stride + static_cast<i64>(head) * HEAD_DIM;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int d = lane + 32 * i;
    if (d < HEAD_DIM) to[d] = From<T>::of(seen > 0 ? out[i] / sum : 0.f);
  }
}
