// Activations -> B operands, in the order in which the matrix instructions fetch them.
//
// A step is 128 columns, two tiles; its staged form takes 2048 bytes for every 8 tokens.
//   int8 map:    two planes, x = scale * (256 * high + low), with one scale for each token and step: x keeps 16 bits of its largest
//                value in the step. Up to four tokens' planes share a tile of 8: high planes are tokens 0 to 3 of it, low planes 4 to
//                7, each with its own scale, and a step takes 1024 bytes.
//   float16 map: float16. float16 input is copied. bfloat16 input is multiplied by a power of two for each token and step, so that
//                its largest value lies in [1, 2): exact for everything within 2^-14 of that, and never an overflow.
// Order, for instructions of single warps: [tile 2][part 2][n-tile][lane 32][16 bytes]; lane (g, t) finds token 8 * n_tile + g, columns
// 16 * t .. 16 * t + 15 of the tile. Parts are the high and the low plane, or columns 0..7 and 8..15 as float16.
// For warpgroups: [tile 2][k step][token warp][8 columns of B][k half 2][8][16 bytes] (wgmma.cuh). int8 has 2 k steps of 32 a tile, and
// the low plane's columns follow the high plane's; float16 has 4 of 16.
// Tokens beyond the last are not written: column n of a product reads token n only.
#pragma once
#include "ptx.cuh"

constexpr int kStepColumns = 128;
constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves a rounded integer in the low bits
constexpr u32 kIntegerBits = 0x4B400000u;

struct Eight {
  float value[8];
};

struct Activations {
  const u16* x;  // [tokens, columns], bfloat16 or float16
  i64 stride;    // elements from token to token
  int tokens;
  int columns;
  int aligned;  // rows start at multiples of 16 bytes
};

// Eight neighbouring 16-bit values; beyond the last column zeros.
W3_DEVICE Vec4 load_eight(const Activations& in, int token, int column) {
  const u16* row = in.x + token * in.stride + column;
  Vec4 v = {0, 0, 0, 0};
  if (in.aligned && column + 8 <= in.columns) {
    const uint4 raw = *reinterpret_cast<const uint4*>(row);
    v = {raw.x, raw.y, raw.z, raw.w};
  } else {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (column + e < in.columns) words[e / 2] |= static_cast<u32>(row[e]) << (16 * (e % 2));
    v = {words[0], words[1], words[2], words[3]};
  }
  return v;
}

template <bool bf16>
W3_DEVICE Eight to_floats(Vec4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  Eight out;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (bf16) {
      out.value[2 * e] = __uint_as_float(words[e] << 16);
      out.value[2 * e + 1] = __uint_as_float(words[e] & 0xFFFF0000u);
    } else {
      out.value[2 * e] = half_to_float(words[e] & 0xFFFFu);
      out.value[2 * e + 1] = half_to_float(words[e] >> 16);
    }
  }
  return out;
}

// Where 8 columns (lane `part16` of a half warp: tile, t, half) of a token go.
template <bool int8_map, bool warpgroups, int token_tiles, int token_warps, bool beside>
struct StagePlace {
  char* at;

  W3_DEVICE StagePlace(char* step_out, int part16, int token) {
    const int tile = part16 / 8, t = part16 % 8 / 2, half = part16 % 2, g = token % 8, n_tile = token / 8;
    if constexpr (warpgroups) {
      constexpr int kColumnTiles = (int8_map && !beside ? 2 : 1) * token_tiles;
      const int k_step = int8_map ? 2 * tile + half : 4 * tile + 2 * half;
      at = step_out + ((k_step * token_warps + n_tile / token_tiles) * kColumnTiles + n_tile % token_tiles) * 256 + g * 16 + 4 * t;
    } else {
      constexpr int kAll = token_tiles * token_warps;
      at = step_out + (tile * (beside ? 1 : 2) * kAll + n_tile) * 512 + (4 * g + t) * 16 + (int8_map ? 8 * half : kAll * 512 * half);
    }
  }

  // Eight int8 values of a plane, 0 high or 1 low.
  W3_DEVICE void store_plane(int plane, u32 first, u32 second) const {
    if constexpr (warpgroups) {
      constexpr int kNextPlane = beside ? 4 * 16 : token_tiles * 256;
      *reinterpret_cast<u32*>(at + plane * kNextPlane) = first;
      *reinterpret_cast<u32*>(at + plane * kNextPlane + 128) = second;
    } else {
      constexpr int kNextPlane = beside ? 4 * 4 * 16 : token_tiles * token_warps * 512;
      *reinterpret_cast<uint2*>(at + plane * kNextPlane) = make_uint2(first, second);
    }
  }

  // Eight float16 values.
  W3_DEVICE void store_halves(Vec4 v) const {
    if constexpr (warpgroups) {
      constexpr int kNextStep = token_tiles * token_warps * 256;
      *reinterpret_cast<u32*>(at) = v.x;
      *reinterpret_cast<u32*>(at + 128) = v.y;
      *reinterpret_cast<u32*>(at + kNextStep) = v.z;
      *reinterpret_cast<u32*>(at + kNextStep + 128) = v.w;
    } else {
      *reinterpret_cast<Vec4*>(at) = v;
    }
  }
};

// Stages 8 columns of one token; the 16 lanes of a half warp hold one step of it. `part16` is the lane in the half warp. All 32 lanes
// of a warp call it together.
template <bool bf16, bool int8_map, bool warpgroups, int token_tiles, int token_warps, bool beside>
W3_DEVICE void stage_eight(Vec4 raw, int part16, int token, char* step_out, float* scale_out) {
  const StagePlace<int8_map, warpgroups, token_tiles, token_warps, beside> place(step_out, part16, token);
  if constexpr (!int8_map && !bf16) {
    place.store_halves(raw);
  } else {
    constexpr u32 kMagnitude = 0x7FFF7FFFu;
    u32 largest = larger_halves<bf16>(larger_halves<bf16>(raw.x & kMagnitude, raw.y & kMagnitude),
                                      larger_halves<bf16>(raw.z & kMagnitude, raw.w & kMagnitude));
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2)
      largest = larger_halves<bf16>(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
    const float2 peaks = {bf16 ? __uint_as_float(largest << 16) : half_to_float(largest & 0xFFFFu),
                          bf16 ? __uint_as_float(largest & 0xFFFF0000u) : half_to_float(largest >> 16)};
    const float peak = peaks.x > peaks.y || peaks.x != peaks.x ? peaks.x : peaks.y;
    const bool finite = __float_as_uint(peak) < 0x7F800000u;
    const float nan = __uint_as_float(0x7FFFFFFFu);
    const Eight x = to_floats<bf16>(raw);
    if constexpr (int8_map) {
      const bool any = peak > 1e-30f;  // below, the reciprocal overflows and the product is zero in any case
      const float inverse = any && finite ? 32639.0f * reciprocal_estimate(peak) : 0.0f;
      const float scale = finite ? (any ? peak * (1.0f / (32639.0f * 127.0f)) : 0.0f) : nan;
      u32 bits[8];  // low byte: low plane + 128, next byte: high plane, (v + 128) >> 8
#pragma unroll
      for (int e = 0; e < 8; ++e) bits[e] = __float_as_uint(fmaf(x.value[e], inverse, kInteger + 128.0f));
      u32 low[2], high[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const u32 first = permute(bits[4 * q], bits[4 * q + 1], 0x5410), second = permute(bits[4 * q + 2], bits[4 * q + 3], 0x5410);
        low[q] = permute(first, second, 0x6420) ^ 0x80808080u;
        high[q] = permute(first, second, 0x7531);
      }
      place.store_plane(0, high[0], high[1]);
      place.store_plane(1, low[0], low[1]);
      if (part16 == 0) {
        scale_out[token] = beside ? 256.0f * scale : scale;
        if constexpr (beside) scale_out[token + 4] = scale;
      }
    } else {
      const u32 exponent = min(max(__float_as_uint(peak) >> 23, 2u), 252u);
      const float inverse = __uint_as_float((254u - exponent) << 23);
      const float scale = finite ? __uint_as_float(exponent << 23) : nan;
      Vec4 v;
      v.x = floats_to_half2(x.value[0] * inverse, x.value[1] * inverse);
      v.y = floats_to_half2(x.value[2] * inverse, x.value[3] * inverse);
      v.z = floats_to_half2(x.value[4] * inverse, x.value[5] * inverse);
      v.w = floats_to_half2(x.value[6] * inverse, x.value[7] * inverse);
      place.store_halves(v);
      if (part16 == 0) scale_out[token] = scale;
    }
  }
}
