// What stands between the 8-bit products of a gated MLP: SiLU and product of gate and up, and activations -> E4M3 with a scale for each
// token and 128 columns. Either, or both in one pass.
//
// Shapes: first (and second, where GB_PAIRED) [tokens, columns] float16 or bfloat16 with any row stride; out [tokens, columns] of the same
// dtype, or E4M3 with scales float32 [groups, padded_tokens]: the scale of (token, group) at group * padded_tokens + token, value =
// E4M3 * scale. The largest of 128 becomes 448; where all are zero the scale is 1. One warp takes 128 columns of a token.
#include "ptx.cuh"

constexpr bool kBf16 = GB_BF16;
constexpr bool kPaired = GB_PAIRED;
constexpr bool kQuantized = GB_QUANTIZED;
constexpr float kLargest = 448.0f;

struct alignas(16) Params {
  const u16* first;
  const u16* second;
  void* out;
  float* scales;
  i64 first_stride, second_stride;  // elements from token to token
  int tokens, columns;
  int groups, padded_tokens;
};

struct Four {
  float value[4];
};

W3_DEVICE float widened(u16 bits) {
  return kBf16 ? __uint_as_float(static_cast<u32>(bits) << 16) : half_to_float(bits);
}

W3_DEVICE u16 rounded(float value) {
  return static_cast<u16>(kBf16 ? floats_to_bfloat2(value, 0) : floats_to_half2(value, 0));
}

// Four neighbouring columns; beyond the last zeros.
W3_DEVICE Four load_four(const u16* row, int column, int columns) {
  Four out;
  if (column + 4 <= columns && reinterpret_cast<u64>(row + column) % 8 == 0) {
    const uint2 raw = *reinterpret_cast<const uint2*>(row + column);
    out = {widened(raw.x & 0xFFFF), widened(raw.x >> 16), widened(raw.y & 0xFFFF), widened(raw.y >> 16)};
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) out.value[e] = column + e < columns ? widened(row[column + e]) : 0.0f;
  }
  return out;
}

extern "C" __global__ void __launch_bounds__(128) gateup_between(const __grid_constant__ Params p) {
  launch_dependents();
  wait_for_predecessors();
  const int task = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = task / p.groups, group = task - token * p.groups, column = group * 128 + 4 * lane;
  if (token >= p.tokens) return;
  Four x = load_four(p.first + token * p.first_stride, column, p.columns);
  if constexpr (kPaired) {
    const Four up = load_four(p.second + token * p.second_stride, column, p.columns);
#pragma unroll
    for (int e = 0; e < 4; ++e) x.value[e] = x.value[e] / (1.0f + __expf(-x.value[e])) * up.value[e];
  }
  const i64 at = static_cast<i64>(token) * p.columns + column;
  if constexpr (kQuantized) {
    float peak = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) peak = fmaxf(peak, fabsf(x.value[e]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, distance));
    const float scale = peak > 0 ? fmaxf(peak / kLargest, 1.1754944e-38f) : 1.0f;
    const u32 bytes =
        floats_to_e4m3(x.value[0] / scale, x.value[1] / scale) | floats_to_e4m3(x.value[2] / scale, x.value[3] / scale) << 16;
    unsigned char* const out = static_cast<unsigned char*>(p.out) + at;
    if (column + 4 <= p.columns && reinterpret_cast<u64>(out) % 4 == 0)
      *reinterpret_cast<u32*>(out) = bytes;
    else
      for (int e = 0; e < 4; ++e)
        if (column + e < p.columns) out[e] = static_cast<unsigned char>(bytes >> (8 * e));
    if (lane == 0) p.scales[static_cast<i64>(group) * p.padded_tokens + token] = scale;
  } else {
    u16* const out = static_cast<u16*>(p.out) + at;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + e < p.columns) out[e] = rounded(x.value[e]);
  }
}
