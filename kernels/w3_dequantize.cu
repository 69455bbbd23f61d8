// W3 form -> the weight matrix in float16 or bfloat16, for products with many tokens.
//
// Shapes: codes [row tiles, column tiles, vectors, 32, 4], scales [row tiles, groups, 8, 8] -> weight [rows, columns], row-major, the
// rows row_tile_first * 64 and on. A warp takes one 64x64 tile: lane (g, t) writes 16 neighbouring columns of each of its 8 rows.
// Values equal the reference bit for bit: the map entry and its product with the scale are formed in float32 and rounded once.
#include "ptx.cuh"
#include "w3_words.cuh"

constexpr bool kBf16 = W3_BF16;

struct alignas(16) Params {
  const char* codes;
  const char* scales;
  const void* qmap;
  u16* weight;
  i64 weight_stride;  // elements from row to row
  int rows, columns, row_tile_first, row_tiles;
  int column_tiles, groups, tiles_per_group, map_tiles;
  int weight_aligned, unused;
};

// q / 127, correctly rounded: the estimate's remainder is exact in one fused step.
W3_DEVICE float over_127(float q) {
  constexpr float kInverse = 1.0f / 127.0f;
  const float estimate = q * kInverse;
  return fmaf(fmaf(-127.0f, estimate, q), kInverse, estimate);
}

// The four weights of a selector, times the scale of their row.
template <bool int8_map>
W3_DEVICE void four_weights(const Map<int8_map>& map, u32 selector, float scale, u32& first, u32& second) {
  float v[4];
  if constexpr (int8_map) {
    const u32 biased = lookup(map, selector) ^ 0x80808080u;  // q + 128, to stand in the mantissa of 2^23
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = over_127(__uint_as_float(permute(biased, 0x4B000000u, 0x7440 + e)) - 8388736.0f) * scale;
  } else {
    u32 low, high;
    lookup(map, selector, low, high);
    v[0] = half_to_float(low & 0xFFFFu) * scale;
    v[1] = half_to_float(low >> 16) * scale;
    v[2] = half_to_float(high & 0xFFFFu) * scale;
    v[3] = half_to_float(high >> 16) * scale;
  }
  first = kBf16 ? floats_to_bfloat2(v[0], v[1]) : floats_to_half2(v[0], v[1]);
  second = kBf16 ? floats_to_bfloat2(v[2], v[3]) : floats_to_half2(v[2], v[3]);
}

extern "C" __global__ void __launch_bounds__(256) w3_dequantize(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const i64 index = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
  launch_dependents();
  wait_for_predecessors();
  if (index >= static_cast<i64>(p.row_tiles) * p.column_tiles) return;
  const int row_tile = p.row_tile_first + static_cast<int>(index / p.column_tiles);
  const int tile = static_cast<int>(index % p.column_tiles);
  const char* const words_at = p.codes + (static_cast<i64>(row_tile) * p.column_tiles + tile) * kTileBytes + lane * 16;
  u32 words[4 * kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint4 vector = __ldg(reinterpret_cast<const uint4*>(words_at + v * 512));
    words[4 * v] = vector.x;
    words[4 * v + 1] = vector.y;
    words[4 * v + 2] = vector.z;
    words[4 * v + 3] = vector.w;
  }
  const uint4 scale_words = __ldg(
      reinterpret_cast<const uint4*>(p.scales + (static_cast<i64>(row_tile) * p.groups + tile / p.tiles_per_group) * 128 + 16 * g));
  const u32 scales[4] = {scale_words.x, scale_words.y, scale_words.z, scale_words.w};
  Map<kInt8Map> map;
  if constexpr (!kRowMaps) map = load_map<kInt8Map>(p.qmap, p.map_tiles ? row_tile / p.map_tiles : 0);

  const int column = tile * 64 + 16 * t;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    u32 selector[4];
    block_selectors<kDense>(words, block, selector);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_tile * 64 + 16 * block + 8 * half + g;
      if constexpr (kRowMaps) map = load_map<kInt8Map>(p.qmap, row);
      const float scale = half_to_float((scales[block] >> (16 * half)) & 0xFFFFu);
      u32 out[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) four_weights(map, selector[j] >> (16 * half), scale, out[2 * j], out[2 * j + 1]);
      if (row >= p.rows) continue;
      u16* const to = p.weight + static_cast<i64>(row - 64 * p.row_tile_first) * p.weight_stride + column;
      if (p.weight_aligned && column + 16 <= p.columns) {
        *reinterpret_cast<uint4*>(to) = make_uint4(out[0], out[1], out[2], out[3]);
        *reinterpret_cast<uint4*>(to + 8) = make_uint4(out[4], out[5], out[6], out[7]);
      } else {
#pragma unroll
        for (int e = 0; e < 16; ++e)
          if (column + e < p.columns) to[e] = static_cast<u16>(out[e / 2] >> (16 * (e % 2)));
      }
    }
  }
}
