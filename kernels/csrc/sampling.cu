// Draws the next id of a row, a block a row: mask, temperature, top-k, top-p, min-p, inverse of the cumulative sum at a
// Philox number; or the likeliest id. Says the same as services/executor/sampler.py, in another way:
//
//   An id weighs round(2^44 * e^((score - top score) / temperature)), a whole number, so that sums are exact: they do not
//   depend on the order of threads, and the CPU and every card make the same ones. Temperature's arithmetic is in float64,
//   with operations that IEEE 754 rounds one way only.
//
//   Ids stand in order of falling score, the lower id first among equals; top-k and top-p both keep a first part of that
//   order, which its last id (a Cut) says. That id is found by narrowing a range of scores, three pivots a pass over the
//   row, until so few ids lie in it that each can count those before it (pivots in place of a sort: Qin et al. 2025,
//   "FlashInfer"). A uniform number then picks an id in the order of ids, by sums over parts of parts of the row.
#include "common.cuh"
#include "params.cuh"

typedef unsigned long long u64;

enum Kind : int { IDLE = 0, GREEDY = 1, RANDOM = 2 };

struct SamplingRow {  // as kernels/sampling.py packs it
  double log2_a_score;  // log2(e) / temperature
  double top_p;         // 1 or more: off
  double least_log2;    // log2(min_p); -infinity: off
  u64 seed;
  u64 position;         // of the draw among the row's output ids
  int top_k;            // 0 or less: off
  int mask_row;         // line of `masks`; negative: none
  int kind;             // a Kind; an IDLE row writes nothing
  int unused;
};
static_assert(sizeof(SamplingRow) == 56, "kernels/sampling.py packs 56 bytes");

constexpr int WEIGHT_BITS = 44;    // of the likeliest id; 2^19 ids then sum to less than 2^64
constexpr int PIVOTS = 3;
constexpr int COUNT_BITS = 21;     // PIVOTS counts of ids share a 64-bit word
constexpr int BATCH = 4;           // ids that a thread has loads in flight for
constexpr float LOWEST = -3.402823466e38f;

// ---- scores as ordered integers ----------------------------------------------------------------------------------

constexpr u32 KEY_OF_NOTHING = 0x007fffff;  // -infinity: an id that is not there

// Larger for a larger score; -0 and +0 are equal.
__device__ __forceinline__ u32 key_of(float score) {
  const float x = score == 0 ? 0.f : score;
  const u32 bits = *reinterpret_cast<const u32*>(&x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(u32 key) {
  const u32 bits = key >> 31 ? key & 0x7fffffffu : ~key;
  return *reinterpret_cast<const float*>(&bits);
}

// ---- a block's sums ----------------------------------------------------------------------------------------------

template <int THREADS>
struct Shared {
  u64 parts[THREADS / 32][PIVOTS + 1];
  u64 whole[PIVOTS + 1];
  u64 weights[THREADS];  // of ids that were gathered
  u32 keys[THREADS];
  int ids[THREADS];
  u32 gathered;
  u32 cut_key;
  int cut_id;
};

struct Add {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};
struct Most {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

template <typename Op>
__device__ __forceinline__ u64 over_warp(u64 value, const Op& op) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value = op(value, __shfl_xor_sync(ALL_LANES, value, other));
  return value;
}

// Every thread's values together, told to all. 0 must be neutral.
template <int N, int THREADS, typename Op>
__device__ __forceinline__ void over_block(u64 (&values)[N], Shared<THREADS>& shared, const Op& op) {
  static_assert(N <= PIVOTS + 1, "shared memory has room for PIVOTS + 1");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const u64 sum = over_warp(values[i], op);
    if (lane == 0) shared.parts[warp][i] = sum;
  }
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u64 sum = over_warp(lane < THREADS / 32 ? shared.parts[lane][i] : 0, op);
      if (lane == 0) shared.whole[i] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) values[i] = shared.whole[i];
}

// ---- a row -------------------------------------------------------------------------------------------------------

template <typename T, int THREADS>
struct Row {
  const T* logits;
  const u32* mask;  // bit id % 32 of word id / 32 is set where the id is allowed; null: all are
  int vocab;
  double log2_a_score;
  float top = 0;  // the highest score

  __device__ __forceinline__ bool allowed(int id) const { return !mask || (mask[id / 32] >> (id % 32) & 1); }

  // Calls use(id, logit) for the ids of [begin, end) that are this thread's, those of a warp next to one another.
  template <typename Use>
  __device__ __forceinline__ void each_logit(int begin, int end, const Use& use) const {
    for (int first = begin + threadIdx.x % 32; first < end; first += 32 * BATCH) {
      float logits_of_batch[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) logits_of_batch[i] = to_float(logits[min(first + i * 32, end - 1)]);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        if (first + i * 32 < end) use(first + i * 32, logits_of_batch[i]);
      }
    }
  }

  // [begin, end) of a warp's part when [begin, end) is cut into equal parts of whole words of the mask.
  static __device__ __forceinline__ int part_of(int begin, int end) {
    return ceil_div(end - begin, THREADS) * 32;
  }

  // use(id, score) for all ids of the row, each by one thread; a masked id's score is -infinity.
  template <typename Use>
  __device__ __forceinline__ void each(const Use& use) const {
    const int part = part_of(0, vocab), begin = threadIdx.x / 32 * part;
    each_logit(begin, min(begin + part, vocab),
               [&](int id, float logit) { use(id, allowed(id) ? logit : score_of(KEY_OF_NOTHING)); });
  }

  // log2 of how likely an id is beside the likeliest.
  __device__ __forceinline__ double log2_share(float score) const {
    return (static_cast<double>(score) - static_cast<double>(top)) * log2_a_score;
  }

  __device__ __forceinline__ u64 weight(float score) const {
    const double lead = static_cast<double>(score) - static_cast<double>(top);
    const double log2 = lead * log2_a_score;
    if (!(log2 > -WEIGHT_BITS - 2)) return 0;
    const double whole = rint(log2);
    const double x = fma(lead, log2_a_score, -whole);  // in [-1/2, 1/2]; fma by name, or compilers differ
    double power = 2.5678435993488196e-11;             // 2^x: ln(2)^n / n!, n from 12 down
    power = fma(power, x, 4.44553827187081e-10);
    power = fma(power, x, 7.054911620801121e-09);
    power = fma(power, x, 1.0178086009239696e-07);
    power = fma(power, x, 1.3215486790144305e-06);
    power = fma(power, x, 1.5252733804059838e-05);
    power = fma(power, x, 0.00015403530393381606);
    power = fma(power, x, 0.0013333558146428441);
    power = fma(power, x, 0.009618129107628477);
    power = fma(power, x, 0.055504108664821576);
    power = fma(power, x, 0.2402265069591007);
    power = fma(power, x, 0.6931471805599453);
    power = fma(power, x, 1.0);
    const u64 scale_bits = static_cast<u64>(1023 + WEIGHT_BITS + static_cast<int>(whole)) << 52;
    return static_cast<u64>(rint(power * *reinterpret_cast<const double*>(&scale_bits)));
  }
};

// ---- the first part of the order that is kept --------------------------------------------------------------------

struct Cut {
  u32 key;
  int id;
  __device__ __forceinline__ bool keeps(u32 other_key, int other_id) const {
    return other_key > key || (other_key == key && other_id <= id);
  }
};

// Ids with low < key <= high. Those above weigh `above`, less than the goal; those above `low` the goal or more.
struct Bracket {
  u32 low, high, inside;
  u64 above;
};

// Two pivots divide the scores, the third divides the float numbers there are, so that the range halves at least.
__device__ __forceinline__ void choose(const Bracket& bracket, u32 (&pivots)[PIVOTS]) {
  const double low = fmaxf(score_of(bracket.low), LOWEST), high = score_of(bracket.high);
#pragma unroll
  for (int i = 0; i < PIVOTS; i++) {
    const float between = static_cast<float>(low + (high - low) * (i + 1) / PIVOTS);
    const u32 pivot = i < PIVOTS - 1 ? key_of(between) : bracket.low + (bracket.high - bracket.low) / 2;
    pivots[i] = min(max(pivot, bracket.low + 1), bracket.high - 1);
  }
}

// First id, in the order of ids, up to which the row's measure(id, score) sums to goal_of(whole sum) or more.
template <typename T, int THREADS, typename Measure, typename Goal>
__device__ int find(const Row<T, THREADS>& row, Shared<THREADS>& shared, const Measure& measure, const Goal& goal_of) {
  constexpr int WARPS = THREADS / 32;
  static_assert(WARPS > 1, "one part of a row is the row");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto measure_logit = [&](int id, float logit) {
    return measure(id, row.allowed(id) ? logit : score_of(KEY_OF_NOTHING));
  };
  int begin = 0, end = row.vocab;
  u64 goal = 0;
  for (bool is_whole = true;; is_whole = false) {
    const int part = row.part_of(begin, end), mine = min(begin + warp * part, end);
    u64 sum = 0;
    row.each_logit(mine, min(mine + part, end), [&](int id, float logit) { sum += measure_logit(id, logit); });
    sum = over_warp(sum, Add());
    if (lane == 0) shared.parts[warp][0] = sum;
    __syncthreads();
    if (is_whole) {
      u64 whole = 0;
      for (int w = 0; w < WARPS; w++) whole += shared.parts[w][0];
      goal = goal_of(whole);
    }
    int chosen = 0;
    while (chosen < WARPS - 1 && shared.parts[chosen][0] < goal) goal -= shared.parts[chosen++][0];
    __syncthreads();  // everybody has read the sums
    begin += chosen * part;
    end = min(begin + part, row.vocab);
    if (part == 32) break;
  }
  const int id = begin + lane;
  u64 sum = id < end ? measure_logit(id, to_float(row.logits[id])) : 0;
#pragma unroll
  for (int back = 1; back < 32; back *= 2) {
    const u64 other = __shfl_sync(ALL_LANES, sum, max(lane - back, 0));
    if (lane >= back) sum += other;
  }
  return begin + __ffs(__ballot_sync(ALL_LANES, sum >= goal)) - 1;
}

// The id, in falling order of score, at which the sum of weights reaches the goal; with `counts`, the number of ids.
template <typename T, int THREADS>
__device__ Cut cut_at(const Row<T, THREADS>& row, Shared<THREADS>& shared, bool counts, u64 goal, Bracket bracket) {
  auto measure = [&](float score) { return counts ? 1 : row.weight(score); };
  while (bracket.inside > THREADS && bracket.high - bracket.low > 1) {
    u32 pivots[PIVOTS];
    choose(bracket, pivots);
    u64 found[PIVOTS + 1] = {};  // measures above each pivot within the bracket, and counts
    row.each([&](int, float score) {
      const u32 key = key_of(score);
      if (key <= bracket.low || key > bracket.high) return;
      const u64 size = measure(score);
#pragma unroll
      for (int i = 0; i < PIVOTS; i++) {
        if (key > pivots[i]) {
          found[i] += size;
          found[PIVOTS] += 1ull << (i * COUNT_BITS);
        }
      }
    });
    over_block(found, shared, Add());
    const Bracket before = bracket;
    u32 above_low = before.inside, above_high = 0;
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
      const u32 count = found[PIVOTS] >> (i * COUNT_BITS) & ((1u << COUNT_BITS) - 1);
      if (before.above + found[i] >= goal) {
        if (pivots[i] > bracket.low) {
          bracket.low = pivots[i];
          above_low = count;
        }
      } else if (pivots[i] < bracket.high) {
        bracket.high = pivots[i];
        bracket.above = before.above + found[i];
        above_high = count;
      }
    }
    bracket.inside = above_low - above_high;
  }
  if (bracket.inside > THREADS) {  // many ids with one score: so many of them, from the lowest id on
    const u64 size = measure(score_of(bracket.high));
    const u64 wanted = (goal - bracket.above + size - 1) / size;
    const int id = find(
        row, shared, [&](int, float score) -> u64 { return key_of(score) == bracket.high; }, [&](u64) { return wanted; });
    return {bracket.high, id};
  }
  if (threadIdx.x == 0) shared.gathered = 0;
  __syncthreads();
  row.each([&](int id, float score) {
    const u32 key = key_of(score);
    if (key <= bracket.low || key > bracket.high) return;
    const u32 slot = atomicAdd(&shared.gathered, 1u);
    shared.keys[slot] = key;
    shared.ids[slot] = id;
    shared.weights[slot] = measure(score);
  });
  __syncthreads();
  const int mine = threadIdx.x;
  if (mine < static_cast<int>(bracket.inside)) {
    const Cut at = {shared.keys[mine], shared.ids[mine]};
    u64 sum = bracket.above;
    for (u32 other = 0; other < bracket.inside; other++) {
      if (at.keeps(shared.keys[other], shared.ids[other])) sum += shared.weights[other];
    }
    if (sum >= goal && sum - shared.weights[mine] < goal) {
      shared.cut_key = at.key;
      shared.cut_id = at.id;
    }
  }
  __syncthreads();
  return {shared.cut_key, shared.cut_id};
}

// ---- noise -------------------------------------------------------------------------------------------------------

// A number in [0, 1) times 2^64, 53 random bits of it: Philox4x32-10 (Salmon et al. 2011) keyed by the seed, at the
// counter (position, 0, 0); see services/executor/noise.py.
__device__ __forceinline__ u64 noise(u64 seed, u64 position) {
  u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
  u32 c0 = static_cast<u32>(position), c1 = static_cast<u32>(position >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 product0 = c0 * 0xD2511F53ull, product1 = c2 * 0xCD9E8D57ull;
    c0 = static_cast<u32>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<u32>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<u32>(product1);
    c3 = static_cast<u32>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return static_cast<u64>(c0 >> 5) << 37 | static_cast<u64>(c1 >> 6) << 11;
}

// ---- the kernel --------------------------------------------------------------------------------------------------

template <typename T, int THREADS>
__device__ int draw(Row<T, THREADS>& row, Shared<THREADS>& shared, const SamplingRow& how, u32 lowest, u32 present,
                    u32* kept) {
  const u32 highest = key_of(row.top);
  Cut cut = {KEY_OF_NOTHING, -1};  // all that are there
#pragma unroll 1  // one copy of cut_at, which is most of the kernel's code
  for (int filter = 0; filter < 2; filter++) {
    const bool is_top_k = filter == 0;
    u64 goal = how.top_k;
    Bracket bracket = {lowest - 1, highest, present, 0};
    if (is_top_k) {
      if (how.top_k <= 0 || how.top_k >= static_cast<i64>(present)) continue;
    } else {
      if (how.top_p >= 1) continue;
      // What weighs nothing need not be looked at; with a power of two to spare, since this division is rounded too.
      const double far = static_cast<double>(row.top) - (WEIGHT_BITS + 3) / how.log2_a_score;
      const u32 weightless = key_of(static_cast<float>(fmax(far, static_cast<double>(LOWEST))));
      bracket.low = max(max(cut.key, lowest), weightless) - 1;
      u64 left[2] = {};
      row.each([&](int id, float score) {
        const u32 key = key_of(score);
        if (cut.keeps(key, id)) left[0] += row.weight(score);
        left[1] += key > bracket.low;
      });
      over_block(left, shared, Add());
      goal = static_cast<u64>(ceil(static_cast<double>(left[0]) * how.top_p));
      goal = min(max(goal, static_cast<u64>(1)), left[0]);
      bracket.inside = static_cast<u32>(left[1]);
    }
    cut = cut_at(row, shared, is_top_k, goal, bracket);
  }
  auto stays = [&](int id, float score) {
    return cut.keeps(key_of(score), id) && row.log2_share(score) >= how.least_log2;
  };
  if (kept) {
    const int words = ceil_div(row.vocab, 32);
    for (int word = threadIdx.x / 32; word < words; word += THREADS / 32) {
      const int id = word * 32 + threadIdx.x % 32;
      const bool is_there = id < row.vocab && row.allowed(id) && stays(id, to_float(row.logits[id]));
      const u32 bits = __ballot_sync(ALL_LANES, is_there);
      if (threadIdx.x % 32 == 0) kept[word] = bits;
    }
  }
  const u64 number = noise(how.seed, how.position);
  return find(
      row, shared, [&](int id, float score) -> u64 { return stays(id, score) ? row.weight(score) : 0; },
      [&](u64 whole) { return __umul64hi(number, whole) + 1; });
}

// grid (rows)
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) sampling(const SamplingParams p) {
  const SamplingRow how = static_cast<const SamplingRow*>(p.rows)[blockIdx.x];
  if (how.kind == IDLE) return;
  DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<Shared<THREADS>*>(bytes);
  Row<T, THREADS> row = {static_cast<const T*>(p.logits) + blockIdx.x * p.logits_stride,
                         how.mask_row < 0 ? nullptr : p.masks + how.mask_row * p.mask_stride, p.vocab, how.log2_a_score};

  u64 extremes[2] = {};  // the likeliest id (key, then the complement of the id), the complement of the lowest key
  u64 counts[2] = {};    // ids that are there; logits that no row may have, masked or not
  const int part = row.part_of(0, p.vocab), begin = threadIdx.x / 32 * part;
  row.each_logit(begin, min(begin + part, p.vocab), [&](int id, float logit) {
    counts[1] += !(logit <= -LOWEST);
    const u32 key = key_of(logit);
    if (!row.allowed(id) || key <= KEY_OF_NOTHING) return;
    counts[0]++;
    extremes[0] = Most()(extremes[0], static_cast<u64>(key) << 32 | ~static_cast<u32>(id));
    extremes[1] = Most()(extremes[1], static_cast<u64>(~key));
  });
  over_block(extremes, shared, Most());
  over_block(counts, shared, Add());
  const bool failed = counts[1] > 0 || counts[0] == 0;
  int drawn = failed ? 0 : static_cast<int>(~static_cast<u32>(extremes[0]));
  if (!failed && how.kind == RANDOM) {
    row.top = score_of(static_cast<u32>(extremes[0] >> 32));
    u32* kept = p.kept ? p.kept + blockIdx.x * static_cast<i64>(ceil_div(p.vocab, 32)) : nullptr;
    drawn = draw(row, shared, how, ~static_cast<u32>(extremes[1]), static_cast<u32>(counts[0]), kept);
  }
  if (threadIdx.x == 0) {
    p.token_ids[blockIdx.x] = drawn;
    p.failed[blockIdx.x] = failed;
  }
}
