// Paged causal attention of many new tokens a row, whole prompts or chunks of them (Dao et al. 2022, "FlashAttention";
// Kwon et al. 2023, "PagedAttention").
//
//   grid (query tiles, kv heads, rows); a row's new tokens times the query heads of a kv head are packed, token-major:
//
//   packed row   0    1   ... G-1 | G  ... 2G-1 | 2G ...         a block has WARPS * 16 * TILES packed rows, a warp
//   is           t0h0 t0h1 ...    | t1h0 ...    | t2h0 ...       16 * TILES of them
//
// so one fetch of keys and values serves all G heads, and a warp that reads a fragment of them uses it TILES times: shared
// memory would else be what limits it. Two tiles of KEYS keys are in shared memory: one is computed with while the next
// one arrives. A row may have fewer tiles than the grid; the rest of the blocks leave. Late tiles see most keys, so they
// start first.
#include "common.cuh"
#include "fragments.cuh"
#include "params.cuh"

constexpr int PREFILL_WARPS = 4;

template <typename T, typename KV, int HEAD_DIM, int KEYS, int TILES>
__global__ void __launch_bounds__(32 * PREFILL_WARPS, 1) attn_prefill(const PrefillParams p) {
  using F = Fragments<T, KV, HEAD_DIM>;
  using Q = TileRow<T, HEAD_DIM>;
  constexpr int THREADS = 32 * PREFILL_WARPS;
  constexpr int WARP_ROWS = 16 * TILES, ROWS = PREFILL_WARPS * WARP_ROWS;
  constexpr int TILE = KEYS * F::ROW;
  static_assert(KEYS <= THREADS, "a thread looks up one key");
  const int row = blockIdx.z, kv_head = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 start = p.query_starts[row];
  const int fresh = p.query_starts[row + 1] - static_cast<int>(start);
  const int packed_rows = fresh * p.group, first_packed = (gridDim.x - 1 - blockIdx.x) * ROWS;
  if (first_packed >= packed_rows) return;
  const int before = p.contexts[row] - fresh;  // tokens computed in earlier steps
  const int first_token = first_packed / p.group;
  const int last_token = (min(first_packed + ROWS, packed_rows) - 1) / p.group;
  const int end = before + last_token + 1;  // keys that the tile sees: begin .. end - 1
  const int begin = p.window > 0 ? max(0, before + first_token + 1 - p.window) : 0;

  DYNAMIC_SHARED(shared);
  T* queries = reinterpret_cast<T*>(shared);                          // [ROWS][Q::ROW]
  KV* ring = reinterpret_cast<KV*>(queries + ROWS * Q::ROW);          // [2][keys, values][KEYS][F::ROW]
  i64* places = reinterpret_cast<i64*>(ring + 4 * TILE);              // [2][KEYS]
  const int* table = p.tables + (p.slots ? p.slots[row] : row) * p.table_stride;
  const KV* keys = static_cast<const KV*>(p.keys) + kv_head * p.head_stride;
  const KV* values = static_cast<const KV*>(p.values) + kv_head * p.head_stride;
  const int tiles = ceil_div(end - begin, KEYS);

  auto look_up = [&](int tile) {  // where a tile's keys lie, -1 past the end
    if (threadIdx.x >= KEYS) return;
    const int token = begin + tile * KEYS + threadIdx.x;
    i64 place = -1;
    if (token < end) {
      place = table[token / p.block_tokens] * p.block_stride + static_cast<i64>(token % p.block_tokens) * HEAD_DIM;
    }
    places[tile % 2 * KEYS + threadIdx.x] = place;
  };
  auto fetch = [&](int tile) {
    KV* to = ring + tile % 2 * 2 * TILE;
#pragma unroll
    for (int turn = 0; turn < ceil_div(KEYS * F::CHUNKS, THREADS); turn++) {
      const int i = turn * THREADS + threadIdx.x, key = i / F::CHUNKS, chunk = i % F::CHUNKS * F::CHUNK;
      if (KEYS * F::CHUNKS % THREADS == 0 || key < KEYS) {
        const i64 place = places[tile % 2 * KEYS + key];
        const i64 element = max(place, static_cast<i64>(0)) + chunk;
        cp_async_16(to + key * F::ROW + chunk, keys + element, place >= 0);
        cp_async_16(to + TILE + key * F::ROW + chunk, values + element, place >= 0);
      }
    }
    cp_async_commit();
  };

  const T* query = static_cast<const T*>(p.query) + start * p.query_stride;
  for (int i = threadIdx.x; i < ROWS * Q::CHUNKS; i += THREADS) {
    const int r = i / Q::CHUNKS, chunk = i % Q::CHUNKS * Q::CHUNK;
    const bool in_range = first_packed + r < packed_rows;
    const int packed = in_range ? first_packed + r : 0;
    const i64 head = static_cast<i64>(kv_head) * p.group + packed % p.group;
    const T* from = query + packed / p.group * p.query_stride + head * HEAD_DIM + chunk;
    cp_async_16(queries + r * Q::ROW + chunk, from, in_range);
  }
  cp_async_commit();
  look_up(0);
  __syncthreads();
  fetch(0);
  look_up(1);

  const int first_of_warp = first_packed + warp * WARP_ROWS;
  int positions[TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) positions[i / 2][i % 2] = before + (first_of_warp + lane / 4 + 8 * i) / p.group;
  const int lowest = before + first_of_warp / p.group, highest = before + (first_of_warp + WARP_ROWS - 1) / p.group;
  const ScoreMap score(p.scale * (p.key_scales ? p.key_scales[kv_head] : 1.f), p.cap);
  Softmax<HEAD_DIM> softmax[TILES];
  for (int tile = 0; tile < tiles; tile++) {
    cp_async_wait<0>();
    __syncthreads();  // the tile is there for all, and nobody reads the one before it any more
    if (tile + 1 < tiles) {
      fetch(tile + 1);
      look_up(tile + 2);
    }
    const KV* k_tile = ring + tile % 2 * 2 * TILE;
    float s[TILES][KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
      u32 q[TILES][4];
#pragma unroll
      for (int t = 0; t < TILES; t++) F::load_queries(q[t], queries + (warp * WARP_ROWS + t * 16) * Q::ROW, lane, k);
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        u32 b[4];
        F::load_keys(b, k_tile + n * 16 * F::ROW, lane, k);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          mma_16816<T>(s[t][2 * n], q[t], b[0], b[1]);
          mma_16816<T>(s[t][2 * n + 1], q[t], b[2], b[3]);
        }
      }
    }
    const int first_key = begin + tile * KEYS;
    const bool all_seen = first_key + KEYS - 1 <= lowest && (p.window == 0 || first_key > highest - p.window);
    u32 weights[TILES][KEYS / 16][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      score.apply(s[t]);
      if (!all_seen) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int key = first_key + n * 8 + lane % 4 * 2 + (e & 1), position = positions[t][e >> 1];
            if (key > position || (p.window > 0 && key <= position - p.window)) s[t][n][e] = MASKED;
          }
        }
      }
      softmax[t].template update<T, KEYS / 16>(s[t], weights[t]);
    }
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      u32 of_tiles[TILES][4];
#pragma unroll
      for (int i = 0; i < 4 * TILES; i++) of_tiles[i / 4][i % 4] = weights[i / 4][n][i % 4];
      F::accumulate(softmax, of_tiles, k_tile + TILE + n * 16 * F::ROW, lane);
    }
  }

  const float value_scale = p.value_scales ? p.value_scales[kv_head] : 1.f;
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int t = i / 2, h = i % 2;
    const float sum = row_sum(softmax[t].sum[h]);
    const int packed = first_of_warp + lane / 4 + 8 * i;
    if (packed < packed_rows) {
      const i64 head = static_cast<i64>(kv_head) * p.group + packed % p.group;
      T* to = static_cast<T*>(p.out) + (start + packed / p.group) * p.out_stride + head * HEAD_DIM;
      F::store(to, softmax[t].out, h, value_scale / sum, lane);
    }
  }
}
