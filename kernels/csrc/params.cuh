// What kernels are called with: one struct each, passed by value. kernels/params.py reads this file, so a field here is
// `type name;  // meaning`. Sizes and strides are in elements, strides 64-bit. Null is an empty pointer.
//
//   keys, values   [num_blocks, kv_heads, block_tokens, head_dim]; the last two dimensions are contiguous
//   tables         [slots, table_stride] block ids; entries past a row's context are not read
//   slots          [rows] a row's line in `tables`; null: line = row
//   contexts       [rows] tokens of a row, this step's included; 0: nothing is read, the output is 0
#pragma once

typedef long long i64;

struct DecodeParams {  // attn_decode, attn_decode_reduce
  void* out;                  // [rows, heads, head_dim]
  float* partial_out;         // [rows, heads, splits, head_dim], null with one split
  float* partial_lse;         // [rows, heads, splits] log2 of the sums of exponentials, null with one split
  const void* query;          // [rows, heads, head_dim]
  const void* keys;
  const void* values;
  const int* tables;
  const int* slots;
  const int* contexts;
  const float* key_scales;    // [kv_heads] of fp8 keys, null: 1
  const float* value_scales;  // [kv_heads] of fp8 values, null: 1
  i64 out_stride;             // of a row
  i64 query_stride;           // of a row
  i64 block_stride;           // of keys and of values
  i64 head_stride;            // of keys and of values
  i64 table_stride;
  int heads;                  // of queries
  int group;                  // query heads a kv head
  int block_tokens;
  int window;                 // tokens a query sees, its own included; 0: all
  int splits;                 // parts a row's context is cut into
  float scale;                // of the scores
  float cap;                  // a score s becomes cap * tanh(s / cap); 0: it stays
};

struct PrefillParams {  // attn_prefill, attn_reference
  void* out;                  // [tokens, heads, head_dim]
  const void* query;          // [tokens, heads, head_dim]
  const void* keys;
  const void* values;
  const int* tables;
  const int* slots;
  const int* query_starts;    // [rows + 1] where a row's tokens begin
  const int* contexts;
  const float* key_scales;    // [kv_heads] of fp8 keys, null: 1
  const float* value_scales;  // [kv_heads] of fp8 values, null: 1
  i64 out_stride;             // of a token
  i64 query_stride;           // of a token
  i64 block_stride;           // of keys and of values
  i64 head_stride;            // of keys and of values
  i64 table_stride;
  int rows;
  int heads;                  // of queries
  int group;                  // query heads a kv head
  int block_tokens;
  int window;                 // tokens a query sees, its own included; 0: all
  float scale;                // of the scores
  float cap;                  // a score s becomes cap * tanh(s / cap); 0: it stays
};

struct CacheParams {  // cache_rope
  const void* query;          // [tokens, heads, head_dim] before norm and rope
  const void* key;            // [tokens, kv_heads, head_dim] before norm and rope
  const void* value;          // [tokens, kv_heads, head_dim]
  void* query_out;            // [tokens, heads, head_dim]; may be `query`
  void* keys;
  void* values;
  const i64* places;          // [tokens] block * block_tokens + offset; negative: key and value are not written
  const i64* positions;       // [tokens]; null: 0, 1, 2, ...
  const float* cos;           // [positions, rotary_dim / 2]; not read with inv_freq
  const float* sin;
  const float* inv_freq;      // [rotary_dim / 2] angle = position * inv_freq, in float32; null: cos and sin are read
  const void* query_norm;     // [head_dim] weights of the RMSNorm before rope; null: none
  const void* key_norm;
  const float* key_scales;    // [kv_heads] of fp8 keys, null: 1
  const float* value_scales;
  i64 query_stride;           // of a token
  i64 key_stride;
  i64 value_stride;
  i64 query_out_stride;
  i64 angle_stride;           // of a position in cos and sin
  i64 block_stride;           // of keys and of values
  i64 head_stride;
  int tokens;                 // of the grid
  int heads;
  int kv_heads;
  int block_tokens;
  int rotary_dim;             // the first of a head's dimensions, i turned with i + rotary_dim / 2; 0: no rope
  float rope_factor;          // of cos and sin that are made from inv_freq
  float norm_offset;          // added to the norms' weights: 1 where a family stores them around 0
  float epsilon;              // of the norms
};

struct SamplingParams {  // sampling
  const void* logits;         // [rows, vocab or more]
  const void* rows;           // [rows] a SamplingRow each, see kernels/sampling.py
  const unsigned* masks;      // [mask rows, mask_stride] bit id % 32 of word id / 32: the id is allowed
  i64* token_ids;             // [rows] what was drawn; 0 where it failed
  int* failed;                // [rows] 1: no id could be drawn (NaN or +infinity among the logits, or none is allowed)
  unsigned* kept;             // [rows, words] as in masks, of random rows: what mask and filters left; null: not told
  i64 logits_stride;          // of a row
  i64 mask_stride;            // in words
  int vocab;                  // at most 2^19
};

struct ProbeParams {  // probes.cu says what each of them makes of what
  const void* a;
  const void* b;
  const void* c;
  void* out;
  int count;
};
