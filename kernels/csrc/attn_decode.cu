// Paged attention of one new token a row (Kwon et al. 2023, "PagedAttention"), a row's context cut into splits that run
// beside one another and are merged by their log-sum-exps (Dao et al. 2023, "Flash-Decoding").
//
//   grid (splits, kv heads * query tiles, rows); a query tile is up to 16 query heads of one kv head: the rows of an mma
//
//   a block's part of the context   | 16 | 16 | 16 | 16 | 16 | 16 | ...   keys
//   is read by its warps in turn      w0   w1   w2   w3   w0   w1
//
// A warp owns a ring of STAGES tiles in shared memory which it alone fills and reads, so the loop has no barrier wider
// than the warp. Rows of a tile are padded to an odd number of 16-byte chunks: eight rows then lie in different banks.
#include "common.cuh"
#include "fragments.cuh"
#include "params.cuh"

constexpr int TILE_KEYS = 16;
constexpr int SPLIT_KEYS = 64;  // a split is a multiple of this

struct Range {
  int begin, end;
};

// Keys of a split; both kernels ask, so that a split without keys is neither written nor read.
__device__ __forceinline__ Range split_range(const DecodeParams& p, int context, int split) {
  const int first = p.window > 0 ? max(0, context - p.window) : 0;
  const int keys = ceil_div(ceil_div(context - first, SPLIT_KEYS), p.splits) * SPLIT_KEYS;
  const i64 begin = first + static_cast<i64>(split) * keys;
  return {static_cast<int>(min(begin, static_cast<i64>(context))), static_cast<int>(min(begin + keys, static_cast<i64>(context)))};
}

template <typename T, typename KV, int HEAD_DIM, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS, 1) attn_decode(const DecodeParams p) {
  using F = Fragments<T, KV, HEAD_DIM>;
  constexpr int ROW = F::ROW;  // elements
  constexpr int TILE = TILE_KEYS * ROW;
  const int query_tiles = ceil_div(p.group, 16);
  const int kv_head = blockIdx.y / query_tiles, first_in_group = blockIdx.y % query_tiles * 16;
  const int row = blockIdx.z, split = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int queries = min(16, p.group - first_in_group);
  const i64 first_head = static_cast<i64>(kv_head) * p.group + first_in_group;
  const Range range = split_range(p, p.contexts[row], split);
  if (range.begin >= range.end) {
    if (p.splits > 1) return;
    for (int i = threadIdx.x; i < queries * HEAD_DIM; i += 32 * WARPS) {
      static_cast<T*>(p.out)[row * p.out_stride + first_head * HEAD_DIM + i] = From<T>::of(0.f);
    }
    return;
  }
  const int* table = p.tables + (p.slots ? p.slots[row] : row) * p.table_stride;
  const KV* keys = static_cast<const KV*>(p.keys) + kv_head * p.head_stride;
  const KV* values = static_cast<const KV*>(p.values) + kv_head * p.head_stride;

  DYNAMIC_SHARED(shared);
  KV* ring = reinterpret_cast<KV*>(shared) + warp * STAGES * 2 * TILE;
  const int tiles = ceil_div(range.end - range.begin, TILE_KEYS);

  // Where the key that this lane looks up lies (lanes 16.. repeat 0..), -1 where there is none.
  auto place_of_key = [&](int tile) -> i64 {
    const int token = range.begin + tile * TILE_KEYS + lane % TILE_KEYS;
    if (token >= range.end) return -1;
    return table[token / p.block_tokens] * p.block_stride + static_cast<i64>(token % p.block_tokens) * HEAD_DIM;
  };
  i64 place = place_of_key(warp);
  int next_tile = warp, next_stage = 0;
  auto fetch = [&]() {  // the next tile of this warp; a group is closed in any case, so that groups count tiles
    if (next_tile < tiles) {
      KV* tile = ring + next_stage * 2 * TILE;
#pragma unroll
      for (int i = lane; i < ceil_div(TILE_KEYS * F::CHUNKS, 32) * 32; i += 32) {
        const int key = i / F::CHUNKS, chunk = i % F::CHUNKS * F::CHUNK;
        const i64 from = __shfl_sync(ALL_LANES, place, key);
        if (TILE_KEYS * F::CHUNKS % 32 == 0 || key < TILE_KEYS) {
          const i64 element = max(from, static_cast<i64>(0)) + chunk;
          cp_async_16(tile + key * ROW + chunk, keys + element, from >= 0);
          cp_async_16(tile + TILE + key * ROW + chunk, values + element, from >= 0);
        }
      }
      next_tile += WARPS;
      next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
      place = place_of_key(next_tile);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch();

  u32 q[HEAD_DIM / 16][4];
  const T* query = static_cast<const T*>(p.query) + row * p.query_stride + first_head * HEAD_DIM;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int r = lane / 4 + 8 * (j & 1);
      q[k][j] = r < queries ? *reinterpret_cast<const u32*>(query + r * HEAD_DIM + k * 16 + F::query_column(lane, j)) : 0;
    }
  }

  const ScoreMap score(p.scale * (p.key_scales ? p.key_scales[kv_head] : 1.f), p.cap);
  Softmax<HEAD_DIM> softmax[1];
  int stage = 0;
  for (int tile = warp; tile < tiles; tile += WARPS) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();  // all lanes' copies have landed, and nobody reads the tile that is filled next
    fetch();
    const KV* k_tile = ring + stage * 2 * TILE;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    float s[2][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
      u32 b[4];
      F::load_keys(b, k_tile, lane, k);
      mma_16816<T>(s[0], q[k], b[0], b[1]);
      mma_16816<T>(s[1], q[k], b[2], b[3]);
    }
    score.apply(s);
    if (tile == tiles - 1) {  // the only one that may have fewer keys
      const int first_key = range.begin + tile * TILE_KEYS + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (first_key + n * 8 + (e & 1) >= range.end) s[n][e] = MASKED;
        }
      }
    }
    u32 weights[1][4];
    softmax[0].template update<T, 1>(s, weights);
    F::accumulate(softmax, weights, k_tile + TILE, lane);
  }
  cp_async_wait<0>();
  __syncthreads();  // every warp is done with its ring; the same memory now holds what the warps found

  float* maxima = reinterpret_cast<float*>(shared);   // [WARPS][16]
  float* sums = maxima + WARPS * 16;                  // [WARPS][16]
  float* outs = sums + WARPS * 16;                    // [WARPS][16][HEAD_DIM]
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = warp * 16 + lane / 4 + 8 * h;
    const float sum = row_sum(softmax[0].sum[h]);
    if (lane % 4 == 0) {
      maxima[r] = softmax[0].max[h];
      sums[r] = sum;
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      outs[r * HEAD_DIM + F::out_column(lane, n, 0)] = softmax[0].out[n][2 * h];
      outs[r * HEAD_DIM + F::out_column(lane, n, 1)] = softmax[0].out[n][2 * h + 1];
    }
  }
  __syncthreads();
  const float value_scale = p.value_scales ? p.value_scales[kv_head] : 1.f;
  for (int i = threadIdx.x; i < queries * HEAD_DIM; i += 32 * WARPS) {
    const int r = i / HEAD_DIM, column = i % HEAD_DIM;
    float most = maxima[r];
#pragma unroll
    for (int w = 1; w < WARPS; w++) most = fmaxf(most, maxima[w * 16 + r]);
    float sum = 0, out = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = fast_exp2(maxima[w * 16 + r] - most);
      sum += weight * sums[w * 16 + r];
      out += weight * outs[(w * 16 + r) * HEAD_DIM + column];
    }
    out *= value_scale / sum;
    if (p.splits == 1) {
      static_cast<T*>(p.out)[row * p.out_stride + (first_head + r) * HEAD_DIM + column] = From<T>::of(out);
    } else {
      const i64 part = (row * static_cast<i64>(p.heads) + first_head + r) * p.splits + split;
      p.partial_out[part * HEAD_DIM + column] = out;
      if (column == 0) p.partial_lse[part] = most + log2f(sum);
    }
  }
}

// grid (heads, rows), a thread a dimension
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(HEAD_DIM) attn_decode_reduce(const DecodeParams p) {
  const int head = blockIdx.x, row = blockIdx.y, column = threadIdx.x;
  const int context = p.contexts[row];
  const i64 first_part = (row * static_cast<i64>(p.heads) + head) * p.splits;
  float most = MASKED;
  int used = 0;
  for (; used < p.splits; used++) {
    const Range range = split_range(p, context, used);
    if (range.begin >= range.end) break;  // the empty ones are the last ones
    most = fmaxf(most, p.partial_lse[first_part + used]);
  }
  float sum = 0, out = 0;
  for (int split = 0; split < used; split++) {
    const float weight = fast_exp2(p.partial_lse[first_part + split] - most);
    sum += weight;
    out += weight * p.partial_out[(first_part + split) * HEAD_DIM + column];
  }
  static_cast<T*>(p.out)[row * p.out_stride + static_cast<i64>(head) * HEAD_DIM + column] =
      From<T>::of(used ? out / sum : 0.f);
}
