// Everything between the q/k/v projection and attention, in one pass over memory: RMSNorm of query and key heads (Zhang
// and Sennrich 2019; where a model has it), rotary position embedding (Su et al. 2021, "RoFormer"; dimension i turned
// with i + rotary_dim / 2), and writing keys and values into their blocks.
//
//   grid (tokens, units of a token / units of a block); a unit is one head of query, key or value, 8 dimensions a lane,
//   so a warp holds 32 / (HEAD_DIM / 8) units beside one another.
#include "common.cuh"
#include "params.cuh"

constexpr int CACHE_WARPS = 4;
constexpr int EACH = 8;  // dimensions a lane

template <typename T>
struct alignas(sizeof(T) * EACH) Eight {
  T values[EACH];
};

template <typename T>
__device__ __forceinline__ void load_eight(float (&x)[EACH], const T* from) {
  const Eight<T> raw = *reinterpret_cast<const Eight<T>*>(from);
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] = to_float(raw.values[i]);
}

template <typename T>
__device__ __forceinline__ void store_eight(T* to, const float (&x)[EACH], float factor) {
  Eight<T> raw;
#pragma unroll
  for (int i = 0; i < EACH; i++) raw.values[i] = From<T>::of(x[i] * factor);
  *reinterpret_cast<Eight<T>*>(to) = raw;
}

// x / rms(x) * weights, over the LANES lanes of a unit. Every lane of the warp takes part.
template <int LANES>
__device__ __forceinline__ void normalize(float (&x)[EACH], const float* weights, float epsilon, int lane, bool applies) {
  float mine = 0, all = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) mine += x[i] * x[i];
  const int first = lane / LANES * LANES;
#pragma unroll
  for (int i = 0; i < LANES; i++) all += __shfl_sync(ALL_LANES, mine, min(first + i, 31));
  if (!applies) return;
  const float factor = rsqrtf(all / (LANES * EACH) + epsilon);
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] *= factor * weights[(lane - first) * EACH + i];
}

// Every lane of the warp takes part; `cos` and `sin` are the token's.
template <int LANES>
__device__ __forceinline__ void rotate(float (&x)[EACH], const float* cos, const float* sin, int rotary_dim, int lane,
                                       bool applies) {
  const int chunk = lane % LANES, half = rotary_dim / 2 / EACH;  // in chunks of a lane
  const bool low = chunk < half, turned = applies && chunk < 2 * half;
  const int partner = min(lane + (low ? half : chunk < 2 * half ? -half : 0), 31);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float other = __shfl_sync(ALL_LANES, x[i], partner);
    if (!turned) continue;
    const int angle = (low ? chunk : chunk - half) * EACH + i;
    x[i] = x[i] * cos[angle] + (low ? -other : other) * sin[angle];
  }
}

template <typename T, typename KV, int HEAD_DIM>
__global__ void __launch_bounds__(32 * CACHE_WARPS) cache_rope(const CacheParams p) {
  constexpr int LANES = HEAD_DIM / EACH, UNITS = 32 / LANES;  // of a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x;
  const int unit = (blockIdx.y * CACHE_WARPS + warp) * UNITS + lane / LANES;
  const bool is_query = unit < p.heads, is_key = !is_query && unit < p.heads + p.kv_heads;
  const bool exists = lane / LANES < UNITS && unit < p.heads + 2 * p.kv_heads;
  const int head = is_query ? unit : (unit - p.heads) % p.kv_heads;
  const int dimension = lane % LANES * EACH;

  float x[EACH] = {};
  if (exists) {
    const T* from = is_query ? static_cast<const T*>(p.query) + token * p.query_stride
                    : is_key ? static_cast<const T*>(p.key) + token * p.key_stride
                             : static_cast<const T*>(p.value) + token * p.value_stride;
    load_eight(x, from + static_cast<i64>(head) * HEAD_DIM + dimension);
  }
  const bool turns = exists && (is_query || is_key);
  const float* norm = is_query ? p.query_norm : p.key_norm;
  if (p.query_norm || p.key_norm) normalize<LANES>(x, norm, p.epsilon, lane, turns && norm);
  if (p.cos) {
    const i64 angles = token * static_cast<i64>(p.rotary_dim / 2);
    rotate<LANES>(x, p.cos + angles, p.sin + angles, p.rotary_dim, lane, turns);
  }

  if (!exists) return;
  if (is_query) {
    T* to = static_cast<T*>(p.query_out) + token * p.query_out_stride;
    store_eight(to + static_cast<i64>(head) * HEAD_DIM + dimension, x, 1.f);
    return;
  }
  const i64 place = p.places[token];
  if (place < 0) return;
  const i64 element = place / p.block_tokens * p.block_stride + head * p.head_stride +
                      place % p.block_tokens * HEAD_DIM + dimension;
  const float* scales = is_key ? p.key_scales : p.value_scales;
  KV* to = static_cast<KV*>(is_key ? p.keys : p.values);
  store_eight(to + element, x, scales ? 1 / scales[head] : 1.f);
}
