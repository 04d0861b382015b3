// Draws the next id of a row: grammar mask, temperature, top-k, top-p, min-p, then the inverse of the cumulative
// distribution at one number that seed and position give (Philox4x32-10, Salmon et al. 2011), as the CPU sampler does.
//
//   grid (rows); a warp owns a stretch of the vocabulary.
//
// Weights are integers, 2^-40 of the largest one: sums of integers are the same in any order, so a row's id does not
// depend on how threads take turns. Each filter keeps a first part of the ids in order of falling score, the lower id
// first among equals, so a row comes down to a score and how many ids that have it are kept. That score is found by
// radix selection, eight bits of it a pass.
#include "common.cuh"
#include "params.cuh"

constexpr int SAMPLE_WARPS = 16;
constexpr int SAMPLE_THREADS = 32 * SAMPLE_WARPS;
constexpr float ONE = 1099511627776.f;  // 2^40

typedef unsigned long long u64;

struct Shared {
  u64 bin_weights[256];
  u32 bin_counts[256];
  u64 of_warps[SAMPLE_WARPS];
  u32 equals_of_warps[SAMPLE_WARPS];
  u32 digit;
  u32 above_count;
  u64 above_weight;
};

// The ids kept: scores above `key`, and the first `room` of those equal to it.
struct Cut {
  u32 key;
  u64 room;
};

// Falls and rises with x; NaN above all.
__device__ __forceinline__ u32 order_of(float x) {
  if (x != x) return 0xffffffffu;
  x += 0.f;  // -0 is 0
  const u32 bits = *reinterpret_cast<const u32*>(&x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <typename T>
struct SampleRow {
  const T* logits;
  const u32* mask;  // null: all ids are allowed
  int vocab;
  float best;       // the largest score
  float sharpness;  // log2(e) / temperature

  __device__ __forceinline__ float score(int id) const {
    if (mask && !(mask[id / 32] >> id % 32 & 1)) return -INFINITY;
    return to_float(logits[id]);
  }
  __device__ __forceinline__ u64 weight(float score) const {
    const float below = score - best;  // 0 apart: 0 * infinity is NaN when the temperature is tiny
    return below == 0 ? static_cast<u64>(ONE) : static_cast<u64>(fast_exp2(below * sharpness) * ONE);
  }
};

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
  return x;
}

// Sum over this lane and those below.
__device__ __forceinline__ u64 sum_up_to_here(u64 x, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u64 lower = __shfl_sync(ALL_LANES, x, max(lane - by, 0));
    if (lane >= by) x += lower;
  }
  return x;
}

// The best score, the lowest id that has it in the low half.
template <typename T>
__device__ u64 find_best(const SampleRow<T>& row, Shared& shared) {
  u64 best = 0;
  for (int id = threadIdx.x; id < row.vocab; id += SAMPLE_THREADS) {
    const float raw = to_float(row.logits[id]);
    const u64 mine = static_cast<u64>(order_of(raw != raw ? raw : row.score(id))) << 32 | (0xffffffffu - id);
    best = max(best, mine);
  }
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, bits));
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < SAMPLE_WARPS; w++) best = max(best, shared.of_warps[w]);
  __syncthreads();
  return best;
}

// The bin, from the highest down, at which counts (or weights) reach `target`; warp 0 alone.
__device__ __forceinline__ void choose_digit(Shared& shared, bool by_weight, u64 target) {
  const int lane = threadIdx.x;
  u64 counts = 0, weights = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    counts += shared.bin_counts[255 - lane * 8 - i];
    weights += shared.bin_weights[255 - lane * 8 - i];
  }
  u64 count = shared.above_count + sum_up_to_here(counts, lane) - counts;
  u64 weight = shared.above_weight + sum_up_to_here(weights, lane) - weights;
  const bool reaches = (by_weight ? weight + weights : count + counts) >= target;
  const u32 lanes = __ballot_sync(ALL_LANES, reaches);
  const int chosen = lanes ? __ffs(lanes) - 1 : 31;
  __syncwarp();
  if (lane != chosen) return;
  int bin = 255 - lane * 8;
  for (int i = 0; i < 7; i++) {
    const u64 more_count = count + shared.bin_counts[bin], more_weight = weight + shared.bin_weights[bin];
    if ((by_weight ? more_weight : more_count) >= target) break;
    count = more_count;
    weight = more_weight;
    bin--;
  }
  shared.digit = bin;
  shared.above_count = count;
  shared.above_weight = weight;
}

// The highest score at which as many ids (or as much weight) as `target` are kept.
template <typename T>
__device__ Cut select(const SampleRow<T>& row, Shared& shared, bool by_weight, u64 target) {
  u32 key = 0;
  if (threadIdx.x == 0) shared.above_count = shared.above_weight = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = threadIdx.x; bin < 256; bin += SAMPLE_THREADS) shared.bin_counts[bin] = shared.bin_weights[bin] = 0;
    __syncthreads();
    for (int id = threadIdx.x; id < row.vocab; id += SAMPLE_THREADS) {
      const float score = row.score(id);
      const u32 order = order_of(score);
      if (shift < 24 && order >> (shift + 8) != key >> (shift + 8)) continue;
      atomicAdd(&shared.bin_counts[order >> shift & 255], 1u);
      atomicAdd(&shared.bin_weights[order >> shift & 255], row.weight(score));
    }
    __syncthreads();
    if (threadIdx.x < 32) choose_digit(shared, by_weight, target);
    __syncthreads();
    key |= shared.digit << shift;
  }
  u64 room = target - shared.above_count;
  if (by_weight) {
    const u64 count = shared.bin_counts[key & 255], weight = shared.bin_weights[key & 255];
    const u64 each = count ? weight / count : 0, missing = target - shared.above_weight;
    room = each ? (missing + each - 1) / each : count;
  }
  __syncthreads();
  return {key, max(room, static_cast<u64>(1))};
}

__device__ __forceinline__ Cut stricter(Cut a, Cut b) {
  return a.key > b.key || (a.key == b.key && a.room < b.room) ? a : b;
}

// Walks the calling warp's stretch of the vocabulary: visit(id, weight, 0 where not kept) with all lanes at a time.
template <typename T, typename Visit>
__device__ __forceinline__ void walk(const SampleRow<T>& row, Cut cut, float min_p, u64 equals_before, Visit visit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = ceil_div(ceil_div(row.vocab, SAMPLE_WARPS), 32) * 32;
  const int end = min(row.vocab, (warp + 1) * each);
  for (int first = warp * each; first < end; first += 32) {
    const int id = first + lane;
    const float score = id < end ? row.score(id) : -INFINITY;
    const u32 order = order_of(score);
    const bool equal = id < end && order == cut.key;
    const u32 equals = __ballot_sync(ALL_LANES, equal);
    const u64 rank = equals_before + __popc(equals & ((1u << lane) - 1));
    equals_before += __popc(equals);
    const u64 weight = id < end ? row.weight(score) : 0;
    const bool kept = (order > cut.key || (equal && rank < cut.room)) && static_cast<float>(weight) >= min_p * ONE;
    if (!visit(id, kept ? weight : 0, __popc(equals))) return;
  }
}

// Weight that is kept in the stretch of each warp, into of_warps. Returns the sum.
template <typename T>
__device__ u64 sum_kept(const SampleRow<T>& row, Shared& shared, Cut cut, float min_p, u64& equals_before) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 equals = 0;
  walk(row, cut, min_p, 0, [&](int, u64, int more) { return equals += more, true; });
  if (lane == 0) shared.equals_of_warps[warp] = equals;
  __syncthreads();
  equals_before = 0;
  for (int w = 0; w < warp; w++) equals_before += shared.equals_of_warps[w];
  u64 mine = 0;
  walk(row, cut, min_p, equals_before, [&](int, u64 weight, int) { return mine += weight, true; });
  mine = warp_sum(mine);
  if (lane == 0) shared.of_warps[warp] = mine;
  __syncthreads();
  u64 total = 0;
  for (int w = 0; w < SAMPLE_WARPS; w++) total += shared.of_warps[w];
  return total;
}

// 53 random bits of (seed, position), at the top of the word: services/executor/noise.py.
__device__ __forceinline__ u64 noise(u64 seed, u64 position) {
  u32 c0 = static_cast<u32>(position), c1 = static_cast<u32>(position >> 32), c2 = 0, c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
    const u32 next0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0, next2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
    c0 = next0;
    c1 = static_cast<u32>(p1);
    c2 = next2;
    c3 = static_cast<u32>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (static_cast<u64>(c0 >> 5) << 26 | c1 >> 6) << 11;
}

template <typename T>
__global__ void __launch_bounds__(SAMPLE_THREADS) sample_rows(const SampleParams p) {
  DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int r = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int mask = p.mask_rows ? p.mask_rows[r] : -1;
  SampleRow<T> row{static_cast<const T*>(p.logits) + r * p.logits_stride,
                   mask >= 0 ? p.masks + mask * p.mask_stride : nullptr, p.vocab, 0, 0};
  const u64 best = find_best(row, shared);
  const u32 highest = static_cast<u32>(best >> 32);
  const int best_id = static_cast<int>(0xffffffffu - static_cast<u32>(best));
  const bool failed = highest >= order_of(INFINITY) || highest <= order_of(-INFINITY);
  const float temperature = p.temperatures[r];
  if (failed || temperature <= 0) {
    if (threadIdx.x == 0) p.out[r] = failed ? -1 : best_id;
    return;
  }
  row.best = row.score(best_id);
  row.sharpness = LOG2_E / temperature;

  Cut cut{0, ~0ull};
  u64 equals_before = 0;
  if (p.top_k[r] > 0 && p.top_k[r] < p.vocab) cut = select(row, shared, false, p.top_k[r]);
  if (p.top_p[r] < 1) {
    const u64 left = sum_kept(row, shared, cut, 0.f, equals_before);
    const u64 target = static_cast<u64>(static_cast<double>(p.top_p[r]) * static_cast<double>(left));
    __syncthreads();
    cut = stricter(cut, select(row, shared, true, min(max(target, static_cast<u64>(1)), left)));
  }
  const u64 total = sum_kept(row, shared, cut, p.min_p[r], equals_before);
  const u64 target = __umul64hi(noise(p.seeds[r], p.positions[r]), total);  // floor(uniform * total)
  u64 before = 0;
  for (int w = 0; w < warp; w++) before += shared.of_warps[w];
  if (target < before || target - before >= shared.of_warps[warp]) return;
  walk(row, cut, p.min_p[r], equals_before, [&](int id, u64 weight, int) {
    const u64 here = before + sum_up_to_here(weight, lane);
    const u32 passed = __ballot_sync(ALL_LANES, here > target);
    before = __shfl_sync(ALL_LANES, here, 31);
    if (passed && lane == __ffs(passed) - 1) p.out[r] = id;
    return passed == 0;
  });
}
