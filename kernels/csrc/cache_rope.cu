// What lies between a layer's projections and its attention, in one pass over memory: RMSNorm of queries and keys where
// the family has one (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), keys and values into the cache.
//
//   grid (tokens, parts of their heads); a token's heads stand in the order queries, keys, values
//
//   head of 128 bfloat16   | lane 0 | lane 1 | ... | lane 15 |   16 bytes a lane, so two heads a warp
//   rotary pairs           element i turns with element i + rotary_dim / 2: another lane's, told through shared memory
//
// All arithmetic is in float32 and rounded once, when it is stored. A head of 80 or 96 leaves lanes idle.
#include "common.cuh"
#include "params.cuh"

constexpr int WARPS_A_BLOCK = 4;

// How a warp's lanes are dealt out to heads.
template <typename T, int HEAD_DIM>
struct Deal {
  static constexpr int CHUNK = 16 / static_cast<int>(sizeof(T));  // elements that a lane moves at once
  static constexpr int CHUNKS = HEAD_DIM / CHUNK;                 // of a head
  static constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : 8;  // of a head
  static constexpr int ROUNDS = ceil_div(CHUNKS, LANES);
  static constexpr int HEADS = 32 / LANES;  // of a warp
  static_assert(HEAD_DIM % CHUNK == 0 && CHUNK % 4 == 0, "a head is whole chunks of whole quads");
};

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T items[N];
};

// cos and sin of four neighbouring pairs.
struct Turns {
  float cos[4], sin[4];
};

// Taylor's series about the nearest multiple of pi/2, which is taken off in two parts (Cody and Waite 1980). A float32
// angle below 2^22 leaves less than 2e-7 of error; CUDA's own cosf spills for large angles.
__device__ __forceinline__ void turn(float angle, float& cos, float& sin) {
  const float quarters = rintf(angle * 0.6366197723675814f);
  const float rest = fmaf(-quarters, -4.37113883e-8f, fmaf(-quarters, 1.57079637f, angle));
  const float z = rest * rest;
  const float s = fmaf(z, fmaf(z, fmaf(z, fmaf(z, 1.f / 362880, -1.f / 5040), 1.f / 120), -1.f / 6), 1.f) * rest;
  const float c = fmaf(z, fmaf(z, fmaf(z, fmaf(z, fmaf(z, -1.f / 3628800, 1.f / 40320), -1.f / 720), 1.f / 24), -0.5f), 1.f);
  const int quarter = static_cast<int>(quarters);
  const bool odd = quarter & 1;
  cos = (quarter + 1) & 2 ? -(odd ? s : c) : (odd ? s : c);
  sin = quarter & 2 ? -(odd ? c : s) : (odd ? c : s);
}

__device__ __forceinline__ Turns turns_of(const CacheParams& p, i64 position, int pair) {
  Turns turns;
  if (p.inv_freq) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      turn(static_cast<float>(position) * p.inv_freq[pair + i], turns.cos[i], turns.sin[i]);
      turns.cos[i] *= p.rope_factor;
      turns.sin[i] *= p.rope_factor;
    }
    return turns;
  }
  const i64 at = position * p.angle_stride + pair;
  const auto cos = *reinterpret_cast<const Pack<float, 4>*>(p.cos + at);
  const auto sin = *reinterpret_cast<const Pack<float, 4>*>(p.sin + at);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    turns.cos[i] = cos.items[i];
    turns.sin[i] = sin.items[i];
  }
  return turns;
}

enum Part : int { QUERY, KEY, VALUE };

// Where a head comes from and goes to.
struct Head {
  Part part;
  int number;  // among the heads of its part
  bool wanted;  // it exists, and has a place
  i64 place;

  __device__ __forceinline__ Head(const CacheParams& p, int token, int head) {
    part = head < p.heads ? QUERY : head < p.heads + p.kv_heads ? KEY : VALUE;
    number = head - (part == QUERY ? 0 : part == KEY ? p.heads : p.heads + p.kv_heads);
    place = part == QUERY ? 0 : p.places[token];
    wanted = head < p.heads + 2 * p.kv_heads && place >= 0;
  }
};

// The lane's elements of a head as floats; zeros where the head has none for it.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load(float (&x)[Deal<T, HEAD_DIM>::ROUNDS][Deal<T, HEAD_DIM>::CHUNK], const T* head,
                                     int lane, bool wanted) {
  using D = Deal<T, HEAD_DIM>;
#pragma unroll
  for (int r = 0; r < D::ROUNDS; r++) {
    const int chunk = lane + r * D::LANES;
    Pack<T, D::CHUNK> raw = {};
    const bool mine = wanted && (D::CHUNKS % D::LANES == 0 || chunk < D::CHUNKS);
    if (mine) raw = reinterpret_cast<const Pack<T, D::CHUNK>*>(head)[chunk];
#pragma unroll
    for (int i = 0; i < D::CHUNK; i++) x[r][i] = mine ? to_float(raw.items[i]) : 0.f;
  }
}

template <typename T, typename Out, int HEAD_DIM>
__device__ __forceinline__ void store(Out* head, const float (&x)[Deal<T, HEAD_DIM>::ROUNDS][Deal<T, HEAD_DIM>::CHUNK],
                                      int lane) {
  using D = Deal<T, HEAD_DIM>;
#pragma unroll
  for (int r = 0; r < D::ROUNDS; r++) {
    const int chunk = lane + r * D::LANES;
    if (D::CHUNKS % D::LANES != 0 && chunk >= D::CHUNKS) continue;
    Pack<Out, D::CHUNK> raw;
#pragma unroll
    for (int i = 0; i < D::CHUNK; i++) raw.items[i] = From<Out>::of(x[r][i]);
    reinterpret_cast<Pack<Out, D::CHUNK>*>(head)[chunk] = raw;
  }
}

template <typename T, typename KV, int HEAD_DIM>
__global__ void __launch_bounds__(32 * WARPS_A_BLOCK) cache_rope(const CacheParams p) {
  using D = Deal<T, HEAD_DIM>;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / D::LANES, lane = threadIdx.x % D::LANES;
  const int group_of_block = warp * D::HEADS + group;
  const i64 token = blockIdx.x;
  const Head head(p, token, blockIdx.y * (WARPS_A_BLOCK * D::HEADS) + group_of_block);
  const i64 stride = head.part == QUERY ? p.query_stride : head.part == KEY ? p.key_stride : p.value_stride;
  const void* source = head.part == QUERY ? p.query : head.part == KEY ? p.key : p.value;

  float x[D::ROUNDS][D::CHUNK];
  load<T, HEAD_DIM>(x, static_cast<const T*>(source) + token * stride + static_cast<i64>(head.number) * HEAD_DIM,
                    lane, head.wanted);

  if (p.query_norm || p.key_norm) {
    float squares = 0;
#pragma unroll
    for (int r = 0; r < D::ROUNDS; r++) {
#pragma unroll
      for (int i = 0; i < D::CHUNK; i++) squares = fmaf(x[r][i], x[r][i], squares);
    }
#pragma unroll
    for (int other = D::LANES / 2; other > 0; other /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, other);
    const T* norm = static_cast<const T*>(head.part == QUERY ? p.query_norm : head.part == KEY ? p.key_norm : nullptr);
    if (norm) {
      const float factor = 1.f / sqrtf(squares / HEAD_DIM + p.epsilon);
      float gain[D::ROUNDS][D::CHUNK];
      load<T, HEAD_DIM>(gain, norm, lane, true);
#pragma unroll
      for (int r = 0; r < D::ROUNDS; r++) {
#pragma unroll
        for (int i = 0; i < D::CHUNK; i++) x[r][i] *= factor * (gain[r][i] + p.norm_offset);
      }
    }
  }

  DYNAMIC_SHARED(shared);
  float* staged = reinterpret_cast<float*>(shared) + group_of_block * HEAD_DIM;
#pragma unroll
  for (int r = 0; r < D::ROUNDS; r++) {
    const int chunk = lane + r * D::LANES;
    if (D::CHUNKS % D::LANES != 0 && chunk >= D::CHUNKS) continue;
#pragma unroll
    for (int i = 0; i < D::CHUNK; i += 4) {
      *reinterpret_cast<Pack<float, 4>*>(staged + chunk * D::CHUNK + i) = {x[r][i], x[r][i + 1], x[r][i + 2], x[r][i + 3]};
    }
  }
  __syncwarp();
  if (!head.wanted) return;
  if (head.part != VALUE && p.rotary_dim > 0) {
    const i64 position = p.positions ? p.positions[token] : token;
    const int half = p.rotary_dim / 2;
#pragma unroll
    for (int r = 0; r < D::ROUNDS; r++) {
#pragma unroll
      for (int i = 0; i < D::CHUNK; i += 4) {
        const int first = (lane + r * D::LANES) * D::CHUNK + i;
        if (first >= p.rotary_dim) continue;
        const bool low = first < half;
        const int pair = low ? first : first - half;
        const Turns turns = turns_of(p, position, pair);
        const auto other = *reinterpret_cast<const Pack<float, 4>*>(staged + (low ? pair + half : pair));
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float across = other.items[e] * turns.sin[e];
          x[r][i + e] = fmaf(x[r][i + e], turns.cos[e], low ? -across : across);
        }
      }
    }
  }
  if (head.part == QUERY) {
    T* out = static_cast<T*>(p.query_out) + token * p.query_out_stride + static_cast<i64>(head.number) * HEAD_DIM;
    store<T, T, HEAD_DIM>(out, x, lane);
    return;
  }
  const u32 place = static_cast<u32>(head.place), block = place / p.block_tokens, offset = place % p.block_tokens;
  KV* cache = static_cast<KV*>(head.part == KEY ? p.keys : p.values) + block * p.block_stride +
              head.number * p.head_stride + static_cast<i64>(offset) * HEAD_DIM;
  const float* scales = head.part == KEY ? p.key_scales : p.value_scales;
  if (sizeof(KV) == 1 && scales) {
    const float inverse = 1.f / scales[head.number];
#pragma unroll
    for (int r = 0; r < D::ROUNDS; r++) {
#pragma unroll
      for (int i = 0; i < D::CHUNK; i++) x[r][i] *= inverse;
    }
  }
  store<T, KV, HEAD_DIM>(cache, x, lane);
}
