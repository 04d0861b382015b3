// Paged causal attention of many new tokens a row, whole prompts or chunks of them (Dao et al. 2022, "FlashAttention";
// Kwon et al. 2023, "PagedAttention").
//
//   grid (query tiles, kv heads, rows); a row's new tokens times the query heads of a kv head are packed, token-major:
//
//   packed row   0    1   ... G-1 | G  ... 2G-1 | 2G ...         a tile is WARPS * 16 packed rows, a warp has 16
//   is           t0h0 t0h1 ...    | t1h0 ...    | t2h0 ...
//
// so one fetch of keys and values serves all G heads. Two tiles of KEYS keys are in shared memory: one is computed with
// while the next one arrives. A row may have fewer tiles than the grid; the rest of the blocks leave. Late tiles see most
// keys, so they start first.
#include "common.cuh"
#include "fragments.cuh"
#include "params.cuh"

constexpr int PREFILL_WARPS = 4;
constexpr int PREFILL_ROWS = 16 * PREFILL_WARPS;

template <typename T, typename KV, int HEAD_DIM, int KEYS>
__global__ void __launch_bounds__(32 * PREFILL_WARPS, 1) attn_prefill(const PrefillParams p) {
  using F = Fragments<T, KV, HEAD_DIM>;
  using Q = TileRow<T, HEAD_DIM>;
  constexpr int THREADS = 32 * PREFILL_WARPS;
  constexpr int TILE = KEYS * F::ROW;
  constexpr bool QUERY_IN_REGISTERS = HEAD_DIM <= 128;
  const int row = blockIdx.z, kv_head = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 start = p.query_starts[row];
  const int fresh = p.query_starts[row + 1] - static_cast<int>(start);
  const int packed_rows = fresh * p.group, first_packed = (gridDim.x - 1 - blockIdx.x) * PREFILL_ROWS;
  if (first_packed >= packed_rows) return;
  const int before = p.contexts[row] - fresh;  // tokens computed in earlier steps
  const int first_token = first_packed / p.group;
  const int last_token = (min(first_packed + PREFILL_ROWS, packed_rows) - 1) / p.group;
  const int end = before + last_token + 1;  // keys that the tile sees: begin .. end - 1
  const int begin = p.window > 0 ? max(0, before + first_token + 1 - p.window) : 0;

  DYNAMIC_SHARED(shared);
  T* queries = reinterpret_cast<T*>(shared);                              // [PREFILL_ROWS][Q::ROW]
  KV* ring = reinterpret_cast<KV*>(queries + PREFILL_ROWS * Q::ROW);      // [2][keys, values][KEYS][F::ROW]
  i64* places = reinterpret_cast<i64*>(ring + 4 * TILE);                  // [2][KEYS]
  const int* table = p.tables + (p.slots ? p.slots[row] : row) * p.table_stride;
  const KV* keys = static_cast<const KV*>(p.keys) + kv_head * p.head_stride;
  const KV* values = static_cast<const KV*>(p.values) + kv_head * p.head_stride;
  const int tiles = ceil_div(end - begin, KEYS);

  auto look_up = [&](int tile) {  // where a tile's keys lie, -1 past the end
    for (int i = threadIdx.x; i < KEYS; i += THREADS) {
      const int token = begin + tile * KEYS + i;
      i64 place = -1;
      if (token < end) {
        place = table[token / p.block_tokens] * p.block_stride + static_cast<i64>(token % p.block_tokens) * HEAD_DIM;
      }
      places[tile % 2 * KEYS + i] = place;
    }
  };
  auto fetch = [&](int tile) {
    KV* to = ring + tile % 2 * 2 * TILE;
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * F::CHUNKS; i += THREADS) {
      const int key = i / F::CHUNKS, chunk = i % F::CHUNKS * F::CHUNK;
      const i64 place = places[tile % 2 * KEYS + key];
      const i64 element = max(place, static_cast<i64>(0)) + chunk;
      cp_async_16(to + key * F::ROW + chunk, keys + element, place >= 0);
      cp_async_16(to + TILE + key * F::ROW + chunk, values + element, place >= 0);
    }
    cp_async_commit();
  };

  const T* query = static_cast<const T*>(p.query) + start * p.query_stride;
  for (int i = threadIdx.x; i < PREFILL_ROWS * Q::CHUNKS; i += THREADS) {
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

  auto load_query = [&](u32 (&q)[4], int k) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const T* at = queries + (warp * 16 + lane / 4 + 8 * (j & 1)) * Q::ROW + k * 16 + F::query_column(lane, j);
      q[j] = *reinterpret_cast<const u32*>(at);
    }
  };
  u32 kept[QUERY_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];
  if (QUERY_IN_REGISTERS) {
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) load_query(kept[QUERY_IN_REGISTERS ? k : 0], k);
  }

  const int first_of_warp = first_packed + warp * 16;
  const int positions[2] = {before + (first_of_warp + lane / 4) / p.group,
                            before + (first_of_warp + lane / 4 + 8) / p.group};
  const int lowest = before + first_of_warp / p.group, highest = before + (first_of_warp + 15) / p.group;
  const ScoreMap score(p.scale * (p.key_scales ? p.key_scales[kv_head] : 1.f), p.cap);
  Softmax<HEAD_DIM> softmax;
  for (int tile = 0; tile < tiles; tile++) {
    cp_async_wait<0>();
    __syncthreads();  // the tile is there for all, and nobody reads the one before it any more
    if (tile + 1 < tiles) {
      fetch(tile + 1);
      look_up(tile + 2);
    }
    const KV* k_tile = ring + tile % 2 * 2 * TILE;
    float s[KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
      u32 from_shared[4];
      if (!QUERY_IN_REGISTERS) load_query(from_shared, k);
      const u32(&q)[4] = QUERY_IN_REGISTERS ? kept[QUERY_IN_REGISTERS ? k : 0] : from_shared;
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        u32 b[4];
        F::load_keys(b, k_tile + n * 16 * F::ROW, lane, k);
        mma_16816<T>(s[2 * n], q, b[0], b[1]);
        mma_16816<T>(s[2 * n + 1], q, b[2], b[3]);
      }
    }
    const int first_key = begin + tile * KEYS;
    const bool all_seen = first_key + KEYS - 1 <= lowest && (p.window == 0 || first_key > highest - p.window);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[n][e] = score(s[n][e]);
        if (!all_seen) {
          const int key = first_key + n * 8 + lane % 4 * 2 + (e & 1), position = positions[e >> 1];
          if (key > position || (p.window > 0 && key <= position - p.window)) s[n][e] = MASKED;
        }
      }
    }
    u32 weights[KEYS / 16][4];
    softmax.template update<T, KEYS / 16>(s, weights);
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) F::accumulate(softmax.out, weights[n], k_tile + TILE + n * 16 * F::ROW, lane);
  }

  const float value_scale = p.value_scales ? p.value_scales[kv_head] : 1.f;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = row_sum(softmax.sum[h]);
    const int packed = first_of_warp + lane / 4 + 8 * h;
    if (packed < packed_rows) {
      const i64 head = static_cast<i64>(kv_head) * p.group + packed % p.group;
      T* to = static_cast<T*>(p.out) + (start + packed / p.group) * p.out_stride + head * HEAD_DIM;
      F::store(to, softmax.out, h, value_scale / sum, lane);
    }
  }
}
